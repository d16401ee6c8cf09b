/*
 * What the host side of every kernel shares: errors, launches.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_LAUNCH_H
#define CSA_CUDA_LAUNCH_H

#include "../context.h"

#include <cuda_runtime.h>

/* csa_fail of the core, set when it opens the module. */
extern csa_status (*csa_cuda_fail)(csa_status status, const char *format, ...);

/* CSA_OK, or the error's text after what was being done. */
csa_status csa_cuda_check(cudaError_t error, const char *what);

/* Are rows few enough for a grid and for the kernels' indices? CSA_ERROR_UNSUPPORTED: not. */
csa_status csa_cuda_check_rows(int64_t tokens, int64_t of_token);

/* Bytes of shared memory that a block may have at most on the current device. */
size_t csa_most_shared(void);

/* Makes a context's device the current one while it lives. */
struct csa_on_device {
    int before = -1;
    explicit csa_on_device(const csa_context *context);
    ~csa_on_device();
};

/* A stage with its context's device as the current one. */
template <auto stage, typename... Args> csa_status csa_run_on_device(const csa_context *context, Args... args)
{
    csa_on_device guard(context);
    return stage(context, args...);
}

/* How a kernel is launched. */
struct csa_launch {
    dim3 grid, block;
    size_t shared = 0;
    void *stream = nullptr;
    bool overlap = false; /* may start before the kernel ahead of it has ended; it then waits by itself */
};

/* Queues kernel(params...). */
template <typename... Params, typename... Values>
csa_status csa_queue(const char *name, void (*kernel)(Params...), const csa_launch &l, Values &&...values)
{
    cudaLaunchAttribute overlap = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = l.grid;
    config.blockDim = l.block;
    config.dynamicSmemBytes = l.shared;
    config.stream = (cudaStream_t)l.stream;
    config.attrs = &overlap;
    if (l.overlap) {
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    return csa_cuda_check(cudaLaunchKernelEx(&config, kernel, Params(values)...), name);
}

/* Loads a kernel and lets it use so much dynamic shared memory. */
template <typename... Params> csa_status csa_load(const char *name, void (*kernel)(Params...), size_t shared)
{
    return csa_cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), name);
}

#endif
