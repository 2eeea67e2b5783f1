// What cpu_shim.h and cpu_peer.h want of the C++ library and the system: g++ reads it compiled, since it takes as long
// as a kernel.
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
#include <ucontext.h>
#include <unistd.h>
