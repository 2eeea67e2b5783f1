/* A stand-in for the CUDA driver, for tests without a GPU: it copies in host memory.

   The structs are written a second time here, from CUDA's documentation of the driver API, so that a wrong field in
   halox gives a wrong value here. Streams 0 and 1 are the legacy default stream; stream 7 is being captured. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { INVALID_VALUE = 1, CAPTURE_UNSUPPORTED = 900 };
enum { MAX_PITCH = 2147483647, UNIFIED = 4 };

typedef struct {
    size_t srcXInBytes, srcY;
    unsigned srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    unsigned dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} Copy2D;

typedef struct {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    unsigned srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight;
    size_t dstXInBytes, dstY, dstZ, dstLOD;
    unsigned dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight;
    size_t WidthInBytes, Height, Depth;
} Copy3D;

/* Variables that the tests read and set. */
int calls_1d, calls_2d, calls_3d, next_error;
int version = 13000, launches;
unsigned launched[9];
uint32_t launched_number;
uint64_t last_stream;

static int refused(uint64_t stream)
{
    int error = next_error;
    next_error = 0;
    last_stream = stream;
    return error;
}

static int copy(uint64_t to, uint64_t from, size_t n)
{
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, n);
    return 0;
}

int cuDriverGetVersion(int *found)
{
    *found = version;
    return 0;
}

int cuGetErrorName(int error, const char **name)
{
    if (error != INVALID_VALUE && error != CAPTURE_UNSUPPORTED) return INVALID_VALUE;
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    return 0;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, uint64_t stream)
{
    calls_1d++;
    int error = refused(stream);
    return error ? error : copy(to, from, n);
}

int cuMemcpy2DAsync_v2(const Copy2D *c, uint64_t stream)
{
    calls_2d++;
    int error = refused(stream);
    if (error) return error;
    if (c->srcMemoryType != UNIFIED || c->dstMemoryType != UNIFIED || c->srcHost || c->dstHost || c->srcArray ||
        c->dstArray || c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY || c->srcPitch < c->WidthInBytes ||
        c->dstPitch < c->WidthInBytes || c->srcPitch > MAX_PITCH || c->dstPitch > MAX_PITCH)
        return INVALID_VALUE;
    for (size_t y = 0; y < c->Height; y++)
        copy(c->dstDevice + y * c->dstPitch, c->srcDevice + y * c->srcPitch, c->WidthInBytes);
    return 0;
}

int cuMemcpy3DAsync_v2(const Copy3D *c, uint64_t stream)
{
    calls_3d++;
    int error = refused(stream);
    if (error) return error;
    if (c->srcMemoryType != UNIFIED || c->dstMemoryType != UNIFIED || c->srcHost || c->dstHost || c->srcArray ||
        c->dstArray || c->reserved0 || c->reserved1 || c->srcXInBytes || c->srcY || c->srcZ || c->srcLOD ||
        c->dstXInBytes || c->dstY || c->dstZ || c->dstLOD || c->srcPitch < c->WidthInBytes ||
        c->dstPitch < c->WidthInBytes || c->srcPitch > MAX_PITCH || c->dstPitch > MAX_PITCH ||
        c->srcHeight < c->Height || c->dstHeight < c->Height)
        return INVALID_VALUE;
    for (size_t z = 0; z < c->Depth; z++)
        for (size_t y = 0; y < c->Height; y++)
            copy(c->dstDevice + (z * c->dstHeight + y) * c->dstPitch,
                 c->srcDevice + (z * c->srcHeight + y) * c->srcPitch, c->WidthInBytes);
    return 0;
}

typedef struct {
    int id;
    char pad[4];
    int value;
    char rest[60];
} LaunchAttribute;

typedef struct {
    unsigned shape[6], shared_bytes;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned count;
} LaunchConfig;

/* Records the shape, the shared memory, the dependent launch (attribute 6), and the kernel's only argument. */
int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **arguments, void **extra)
{
    if (!function || extra || config->count > 1) return INVALID_VALUE;
    memcpy(launched, config->shape, sizeof config->shape);
    launched[6] = config->shared_bytes;
    launched[7] = config->count ? (unsigned)config->attributes->id : 0;
    launched[8] = config->count ? (unsigned)config->attributes->value : 0;
    launched_number = *(uint32_t *)arguments[0];
    launches++;
    return refused((uint64_t)(uintptr_t)config->stream);
}

/* Like the driver's function, finds the newest form of a function in this version of CUDA by its plain name. */
int cuGetProcAddress_v2(const char *name, void **found, int wanted, uint64_t flags, int *status)
{
    char newer[200];
    Dl_info self;
    (void)flags;
    dladdr((void *)cuDriverGetVersion, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *found = dlsym(library, newer);
    if (!*found) *found = dlsym(library, name);
    (void)wanted;
    if (status) *status = !*found;
    return *found ? 0 : 500;
}

int cuStreamIsCapturing(uint64_t stream, int *status)
{
    *status = stream == 7;
    return stream < 2 ? INVALID_VALUE : 0;
}
