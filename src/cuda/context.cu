/*
 * The module's entry, its GPUs, and the table of its stages.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../step.h"
#include "launch.h"
#include "module.h"
#include "stages.h"

#include <stdio.h>
#include <string.h>

/* ---- Errors, the current device ----------------------------------------------------------------- */

csa_status (*csa_cuda_fail)(csa_status status, const char *format, ...);

csa_status csa_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return CSA_OK;
    cudaGetLastError(); /* it is reported here, not by the next call too */
    return csa_cuda_fail(CSA_ERROR_DEVICE, "cuda: %s: %s", what, cudaGetErrorString(error));
}

csa_status csa_cuda_check_rows(int64_t tokens, int64_t of_token)
{
    if (tokens == 0 || of_token <= INT32_MAX / tokens)
        return CSA_OK;
    return csa_cuda_fail(
        CSA_ERROR_UNSUPPORTED,
        "%lld tokens of %lld rows each: the cuda back end takes at most 2^31 - 1 rows at a time",
        (long long)tokens, (long long)of_token);
}

size_t csa_most_shared(void)
{
    int device = 0, most = 0;
    if (cudaGetDevice(&device) == cudaSuccess)
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return (size_t)most;
}

csa_on_device::csa_on_device(const csa_context *context)
{
    int now = -1;
    if (cudaGetDevice(&now) == cudaSuccess && now != context->device &&
        cudaSetDevice(context->device) == cudaSuccess)
        before = now;
}

csa_on_device::~csa_on_device()
{
    if (before >= 0)
        cudaSetDevice(before);
}

/* ---- The table: each stage runs on the context's device ----------------------------------------- */

static const csa_stages stages = {
    csa_run_on_device<csa_cuda_prepare, const csa_prepare_args *>,
    csa_run_on_device<csa_cuda_summarize_decode, const csa_summarize_args *>,
    csa_run_on_device<csa_cuda_summarize_verify, const csa_summarize_args *>,
    csa_run_on_device<csa_cuda_summarize_prefill, const csa_summarize_args *>,
    csa_run_on_device<csa_cuda_summarize_metadata, const csa_summarize_args *>,
    csa_run_on_device<csa_cuda_prepare_and_summarize, const csa_prepare_args *, const csa_summarize_args *>,
    csa_run_on_device<csa_cuda_score, const csa_score_args *>,
    csa_run_on_device<csa_cuda_select, const csa_select_args *>,
    csa_run_on_device<csa_cuda_attend, const csa_attend_args *>,
    csa_run_on_device<csa_cuda_gate, const csa_gate_args *>,
    csa_run_on_device<csa_cuda_step, const csa_plan *, const csa_step_args *>,
    csa_host_layer, /* stage by stage, each of them above */
    &csa_cuda_compat_stages,
};

/* ---- GPUs --------------------------------------------------------------------------------------- */

enum { LEAST_MAJOR = 8, TUNED_MAJOR = 9 };

/* Can the device run the kernels, and which? */
static bool supported(const cudaDeviceProp *p)
{
    return p->major >= LEAST_MAJOR;
}

/* The tuned tier needs code that was compiled for it, not what the driver makes of another's. */
static const char *best_tier(const cudaDeviceProp *p)
{
    const int built[] = {__CUDA_ARCH_LIST__};
    bool tuned = false;
    for (int architecture : built)
        tuned = tuned || architecture == 100 * TUNED_MAJOR;
    return tuned && p->major == TUNED_MAJOR && p->minor == 0 ? "sm90" : "portable";
}

/* How many GPUs there are; if none, `why` (of 128 bytes) says why. The runtime calls a missing driver too old.
 */
static int count_devices(char *why)
{
    int count = 0, driver = 0, built = CUDART_VERSION;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaSuccess)
        snprintf(why, 128, "no GPU");
    else if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        snprintf(why, 128, "no NVIDIA driver");
    else if (error == cudaErrorInsufficientDriver)
        snprintf(why, 128, "the NVIDIA driver is for CUDA %d.%d, this needs %d.%d", driver / 1000,
                 driver % 100 / 10, built / 1000, built % 100 / 10);
    else
        snprintf(why, 128, "no GPU: %s", cudaGetErrorString(error));
    return error == cudaSuccess ? count : 0;
}

static csa_status describe_device(int32_t device, char *text, size_t capacity)
{
    char why[128];
    cudaDeviceProp p;
    if (device < 0 || device >= count_devices(why) || cudaGetDeviceProperties(&p, device) != cudaSuccess)
        return CSA_ERROR_ARGUMENT;
    if (supported(&p))
        snprintf(text, capacity, "%.64s, compute capability %d.%d, %d multiprocessors, %.0f GB, tier %s",
                 p.name, p.major, p.minor, p.multiProcessorCount, (double)p.totalGlobalMem / 1e9,
                 best_tier(&p));
    else
        snprintf(text, capacity, "%.64s, compute capability %d.%d: not supported, %d.0 is the least", p.name,
                 p.major, p.minor, LEAST_MAJOR);
    return supported(&p) ? CSA_OK : CSA_ERROR_UNSUPPORTED;
}

static csa_status describe(char *text, size_t capacity)
{
    char why[128], line[256];
    int count = count_devices(why), usable = 0;
    for (int device = 0; device < count; device++)
        usable += describe_device(device, line, sizeof line) == CSA_OK;
    if (count == 0)
        snprintf(text, capacity, "%s", why);
    else if (usable == 0)
        snprintf(text, capacity, "none of %d GPUs has compute capability %d.0 or later", count, LEAST_MAJOR);
    else
        snprintf(text, capacity, "%d of %d GPUs, tiers sm90, portable", usable, count);
    return usable ? CSA_OK : CSA_ERROR_UNSUPPORTED;
}

/* ---- Contexts ----------------------------------------------------------------------------------- */

static csa_status load_all(void)
{
    csa_status (*const load[])(void) = {csa_cuda_load_prepare, csa_cuda_load_summarize, csa_cuda_load_score,
                                        csa_cuda_load_select,  csa_cuda_load_attend,    csa_cuda_load_gate,
                                        csa_cuda_load_compat};
    csa_status status = CSA_OK;
    for (size_t i = 0; i < sizeof load / sizeof *load && status == CSA_OK; i++)
        status = load[i]();
    return status;
}

static csa_status open_context(csa_context *context, int32_t device, const char *tier)
{
    cudaDeviceProp p;
    char why[128];
    int count = count_devices(why);
    if (count == 0)
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "csa_context_create: back end cuda: %s", why);
    if (device < 0 || device >= count)
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED,
                             "csa_context_create: device is %d, this machine has %d GPUs", (int)device, count);
    csa_status status = csa_cuda_check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties");
    if (status != CSA_OK)
        return status;
    if (!supported(&p))
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED,
                             "csa_context_create: %s has compute capability %d.%d, "
                             "supported: %d.0 and later",
                             p.name, p.major, p.minor, LEAST_MAJOR);
    const char *best = best_tier(&p);
    if (tier && strcmp(tier, best) != 0 && strcmp(tier, "portable") != 0)
        return csa_cuda_fail(
            CSA_ERROR_UNSUPPORTED,
            "csa_context_create: back end cuda: tier %.32s is unknown or does not run on device %d, tiers: %s",
            tier, (int)device, strcmp(best, "portable") ? "sm90, portable" : best);
    context->stages = &stages;
    context->device = device;
    context->multiprocessors = p.multiProcessorCount;
    context->portable = strcmp(tier ? tier : best, "portable") == 0;
    context->tier = context->portable ? "portable" : "sm90";
    csa_on_device guard(context);
    status = load_all();
    if (status == CSA_OK && !context->portable)
        context->most_cluster = csa_cuda_most_cluster();
    return status;
}

static csa_status warm_up(const csa_context *context, void *workspace, size_t bytes)
{
    csa_on_device guard(context);
    csa_status status = CSA_OK;
    if (bytes)
        status = csa_cuda_check(cudaMemset(workspace, 0, bytes), "csa_warm_up: clearing the workspace");
    return status == CSA_OK ? csa_cuda_check(cudaDeviceSynchronize(), "csa_warm_up") : status;
}

static csa_status fetch(const csa_context *context, void *to, const void *from, size_t bytes, void *stream)
{
    csa_on_device guard(context);
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize((cudaStream_t)stream);
    return csa_cuda_check(error, "checking mode: reading ids");
}

extern "C" CSA_API const csa_cuda_module *csa_cuda_enter(const csa_cuda_host *host)
{
    static const csa_cuda_module module = {describe, describe_device, open_context, warm_up, fetch};
    if (host->version != CSA_CUDA_VERSION)
        return nullptr;
    csa_cuda_fail = host->fail;
    return &module;
}
