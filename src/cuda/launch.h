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
    unsigned cluster = 1; /* blocks of a cluster */
};

/* The same in the runtime's terms. */
struct csa_launch_config {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    explicit csa_launch_config(const csa_launch &l)
    {
        config.gridDim = l.grid;
        config.blockDim = l.block;
        config.dynamicSmemBytes = l.shared;
        config.stream = (cudaStream_t)l.stream;
        config.attrs = attributes;
        if (l.overlap) {
            cudaLaunchAttribute &overlap = attributes[config.numAttrs++];
            overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            overlap.val.programmaticStreamSerializationAllowed = 1;
        }
        if (l.cluster > 1) {
            cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim.x = l.cluster;
            cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        }
    }
    csa_launch_config(const csa_launch_config &) = delete; /* config points into it */
};

/* Queues kernel(params...). */
template <typename... Params, typename... Values>
csa_status csa_queue(const char *name, void (*kernel)(Params...), const csa_launch &l, Values &&...values)
{
    csa_launch_config c(l);
    return csa_cuda_check(cudaLaunchKernelEx(&c.config, kernel, Params(values)...), name);
}

/* Can the current device run a launch's clusters at all? */
template <typename... Params> bool csa_clusters_fit(void (*kernel)(Params...), const csa_launch &l)
{
    int clusters = 0;
    csa_launch_config c(l);
    bool known = cudaOccupancyMaxActiveClusters(&clusters, kernel, &c.config) == cudaSuccess;
    cudaGetLastError(); /* not to be found by the next call */
    return known && clusters > 0;
}

/* Loads a kernel and lets it use so much dynamic shared memory. */
template <typename... Params> csa_status csa_load(const char *name, void (*kernel)(Params...), size_t shared)
{
    return csa_cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), name);
}

/* The same of one that is launched in clusters, of more than the 8 blocks that every device with clusters
 * promises. Whether they fit is another question. */
template <typename... Params>
csa_status csa_load_clusters(const char *name, void (*kernel)(Params...), size_t shared)
{
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaGetLastError(); /* a device without clusters */
    return csa_load(name, kernel, shared);
}

#endif
