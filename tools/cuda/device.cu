/*
 * A GPU for `csa bench`: errors, memory, graphs and their times.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "device.h"

#include <cstdio>

namespace
{

enum : size_t {
    FLUSH_BYTES = (size_t)256 << 20, /* several times any L2 cache */
    SPARE_BYTES = (size_t)512 << 20  /* left for what CUDA itself allocates */
};

char failure[256];
cudaStream_t stream;
cudaEvent_t first, last;
void *flush;
cudaGraphExec_t graph;

/* ---- Memory ------------------------------------------------------------------------------------- */

const char *error()
{
    return failure[0] ? failure : nullptr;
}

void open(char *name, size_t capacity, size_t *cache)
{
    cudaDeviceProp p = {};
    if (!device_check(cudaSetDevice(0), "cudaSetDevice") ||
        !device_check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties"))
        return;
    snprintf(name, capacity, "%s", p.name);
    *cache = (size_t)p.l2CacheSize;
    device_check(cudaStreamCreate(&stream), "cudaStreamCreate");
    device_check(cudaEventCreate(&first), "cudaEventCreate");
    device_check(cudaEventCreate(&last), "cudaEventCreate");
    device_check(cudaMalloc(&flush, FLUSH_BYTES), "cudaMalloc");
}

uint64_t available()
{
    size_t left = 0, total;
    device_check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    return left > SPARE_BYTES ? left - SPARE_BYTES : 0;
}

void *allocate(uint64_t bytes)
{
    void *memory = nullptr;
    if (error() || cudaMalloc(&memory, bytes) == cudaSuccess)
        return memory;
    cudaGetLastError(); /* the caller reports it */
    return nullptr;
}

void release(void *memory)
{
    cudaFree(memory); /* nothing depends on it any more */
}

void copy_in(void *to, const void *from, uint64_t bytes)
{
    if (!error())
        device_check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void clear(void *memory, size_t pitch, size_t width, size_t rows)
{
    if (!error() && width)
        device_check(cudaMemset2D(memory, pitch, 0, width, rows), "cudaMemset2D");
}

/* ---- Graphs ------------------------------------------------------------------------------------- */

void *stream_of_device()
{
    return stream;
}

void begin()
{
    if (error())
        return;
    if (graph)
        device_check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
    graph = nullptr;
    device_check(cudaStreamSynchronize(stream), "the call before its capture");
    device_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

double replay(bool cold)
{
    float milliseconds = 0;
    if (error())
        return 0;
    if (cold)
        device_check(cudaMemsetAsync(flush, 0x5A, FLUSH_BYTES, stream), "cudaMemsetAsync");
    device_check(cudaEventRecord(first, stream), "cudaEventRecord");
    device_check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
    device_check(cudaEventRecord(last, stream), "cudaEventRecord");
    if (device_check(cudaStreamSynchronize(stream), "a graph's replay"))
        device_check(cudaEventElapsedTime(&milliseconds, first, last), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
}

void end()
{
    cudaGraph_t captured = nullptr;
    if (!device_check(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture") || error())
        return;
    device_check(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
    device_check(cudaGraphDestroy(captured), "cudaGraphDestroy");
    replay(false);
}

} // namespace

bool device_check(cudaError_t error_code, const char *what)
{
    if (error_code != cudaSuccess && !failure[0])
        snprintf(failure, sizeof failure, "%s: %s", what, cudaGetErrorString(error_code));
    return failure[0] == '\0';
}

cudaStream_t device_stream()
{
    return stream;
}

extern "C" CSA_API const bench_device *csa_bench_device()
{
    static const bench_device device = {sizeof device, error,       open,    available,    allocate,
                                        release,       device_fill, copy_in, clear,        stream_of_device,
                                        begin,         end,         replay,  device_limits};
    return &device;
}
