// mark: leaves a mark in host memory and does nothing else; mark_body.cu has its meaning. One block.

#include "run_body.cu"
#include "mark_body.cu"

extern "C" __global__ void mark(const Mark given)
{
    check_names(given, leave_mark(given));
}
