/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void device_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("mirror: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    abort();
}

/* ---- CUDA --------------------------------------------------------------------------------------- */

/* The few functions that are needed, by name: no header and no toolkit to build with. All return cudaError_t.
 */
static struct {
    int (*cudaMalloc)(void **memory, size_t bytes);
    int (*cudaFree)(void *memory);
    int (*cudaMemcpy)(void *to, const void *from, size_t bytes, int kind);
    int (*cudaDeviceSynchronize)(void);
    const char *(*cudaGetErrorString)(int error);
} cuda;

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 }; /* cudaMemcpyKind */

static void *open_cudart(void)
{
    const char *names[] = {getenv("CSA_MIRROR_CUDART"), "libcudart.so", "libcudart.so.13", "libcudart.so.12",
                           "/usr/local/cuda/lib64/libcudart.so"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = names[i] ? dlopen(names[i], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library)
        device_fail("no CUDA runtime: %s; CSA_MIRROR_CUDART may name libcudart.so", dlerror());
    return library;
}

static void find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    if (!found)
        device_fail("the CUDA runtime has no %s", name);
    memcpy(function, &found, sizeof found);
}

static void open_cuda(void)
{
    void *library = open_cudart();
    find(library, "cudaMalloc", &cuda.cudaMalloc);
    find(library, "cudaFree", &cuda.cudaFree);
    find(library, "cudaMemcpy", &cuda.cudaMemcpy);
    find(library, "cudaDeviceSynchronize", &cuda.cudaDeviceSynchronize);
    find(library, "cudaGetErrorString", &cuda.cudaGetErrorString);
}

static void expect(int error, const char *what, size_t bytes)
{
    if (error)
        device_fail("%s (%zu bytes): error %d, %s", what, bytes, error, cuda.cudaGetErrorString(error));
}

/* cudaMalloc's alignment is at least 256; the end is exact, for compute-sanitizer to see what reaches past it.
 */
static uint8_t *cuda_allocate(size_t bytes, size_t residue)
{
    void *memory;
    expect(cuda.cudaMalloc(&memory, residue + bytes), "cudaMalloc", bytes);
    return (uint8_t *)memory + residue;
}

static void cuda_release(uint8_t *memory, size_t bytes)
{
    expect(cuda.cudaFree(memory - (uintptr_t)memory % DEVICE_ALIGNMENT), "cudaFree", bytes);
}

static void cuda_copy_in(uint8_t *to, const uint8_t *from, size_t bytes)
{
    expect(cuda.cudaMemcpy(to, from, bytes, HOST_TO_DEVICE), "cudaMemcpy to the device", bytes);
}

static void cuda_copy_out(uint8_t *to, const uint8_t *from, size_t bytes)
{
    expect(cuda.cudaMemcpy(to, from, bytes, DEVICE_TO_HOST), "cudaMemcpy from the device", bytes);
}

static void cuda_synchronise(void)
{
    expect(cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize", 0);
}

const device *device_cuda(void)
{
    static const device functions = {cuda_allocate, cuda_release, cuda_copy_in, cuda_copy_out,
                                     cuda_synchronise};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_cuda);
    return &functions;
}

/* ---- The host, guarded -------------------------------------------------------------------------- */

enum { FILL = 0xC5 };

/* The accessible pages around some memory: no guard is further from its end than the residue demands. */
typedef struct pages {
    uint8_t *start, *end;
} pages;

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Enough for any residue. */
static size_t pages_for(size_t bytes)
{
    return (bytes + DEVICE_ALIGNMENT - 1 + page_size() - 1) / page_size() * page_size();
}

static pages pages_of(uint8_t *memory, size_t bytes)
{
    size_t past = (uintptr_t)(memory + bytes) % page_size();
    uint8_t *end = memory + bytes + (past ? page_size() - past : 0);
    return (pages){end - pages_for(bytes), end};
}

static uint8_t *guarded_allocate(size_t bytes, size_t residue)
{
    size_t size = pages_for(bytes), page = page_size();
    uint8_t *start = mmap(NULL, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED || mprotect(start + page, size, PROT_READ | PROT_WRITE) != 0)
        device_fail("no memory for %zu bytes", bytes);
    uint8_t *end = start + page + size, *memory = end - bytes;
    memory -= ((uintptr_t)memory - residue) % DEVICE_ALIGNMENT;
    memset(start + page, FILL, (size_t)(memory - start) - page);
    memset(memory + bytes, FILL, (size_t)(end - memory) - bytes);
    return memory;
}

static void expect_fill(const uint8_t *from, const uint8_t *end, const char *where)
{
    for (; from < end; from++)
        if (*from != FILL)
            device_fail("a byte %s a tensor's memory was written", where);
}

static void guarded_release(uint8_t *memory, size_t bytes)
{
    pages around = pages_of(memory, bytes);
    expect_fill(around.start, memory, "before");
    expect_fill(memory + bytes, around.end, "past");
    munmap(around.start - page_size(), (size_t)(around.end - around.start) + 2 * page_size());
}

static void guarded_copy(uint8_t *to, const uint8_t *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void guarded_synchronise(void)
{
}

const device *device_guarded(void)
{
    static const device functions = {guarded_allocate, guarded_release, guarded_copy, guarded_copy,
                                     guarded_synchronise};
    return &functions;
}
