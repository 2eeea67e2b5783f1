// points: weighted sums of a field's cells at points, or of the values of points at a field's cells (ADD).
//
// A row is one number: of one component, and of the real or imaginary part. Row r, at `targets[r]`, has the entries
// starts[r] to starts[r + 1], each with a weight and the place of its source. Places are in bytes. Sums of TYPE are
// computed in SUM, in the order of the entries. A row of one entry of weight 1 is exact, and a row without entries is 0.
// With ADD the sum is added to the target.
//
// Launch shape: one dimension, a thread for each row. Each target belongs to one row.

#ifndef TYPE
#define TYPE double
#endif
#ifndef SUM
#define SUM double
#endif
#ifndef WEIGHTED
#define WEIGHTED 1
#endif
#ifndef ADD
#define ADD 0
#endif

typedef TYPE Number;
typedef SUM Sum;

extern "C" __global__ void points(char* target, const char* source, const long long* starts, const long long* targets,
                                  const long long* sources, const double* weights, unsigned rows)
{
    const unsigned row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    const long long first = starts[row], end = starts[row + 1];
    Sum sum = 0;
    for (long long entry = first; entry < end; ++entry) {
        Sum term = Sum(*(const Number*)(source + sources[entry]));
        if (WEIGHTED)
            term = Sum(term * weights[entry]);
        sum = entry == first ? term : Sum(sum + term);
    }
    Number* const to = (Number*)(target + targets[row]);
    *to = ADD ? Number(Sum(*to) + sum) : Number(sum);
}
