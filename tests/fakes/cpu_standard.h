// The headers of the C++ library and the system that cpu_shim.h and cpu_peer.h need. This header is precompiled, since
// it takes as long to compile as a kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>
#include <unistd.h>
