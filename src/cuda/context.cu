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
    csa_run_on_device<csa_cuda_score, const csa_score_args *>,
    csa_run_on_device<csa_cuda_select, const csa_select_args *>,
    csa_run_on_device<csa_cuda_attend, const csa_attend_args *>,
    csa_run_on_device<csa_cuda_gate, const csa_gate_args *>,
    csa_run_on_device<csa_cuda_step, const csa_plan *, const csa_step_args *>,
    csa_run_on_device<csa_cuda_layer, const csa_plan *, const csa_layer_args *>,
    &csa_cuda_compat_stages,
};

/* ---- GPUs --------------------------------------------------------------------------------------- */

enum { LEAST_MAJOR = 8, TUNED_MAJOR = 9 };

/* Can the device run the kernels, and which? */
static bool supported(const cudaDeviceProp *p)
{
    return p->major >= LEAST_MAJOR;
}

static const char *best_tier(const cudaDeviceProp *p)
{
    return p->major == TUNED_MAJOR && p->minor == 0 ? "sm90" : "portable";
}

static int count_devices(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess)
        count = 0;
    cudaGetLastError();
    return count;
}

static bool describe_device(int32_t device, char *text, size_t capacity)
{
    cudaDeviceProp p;
    if (device < 0 || device >= count_devices() || cudaGetDeviceProperties(&p, device) != cudaSuccess)
        return false;
    if (supported(&p))
        snprintf(text, capacity, "%s, compute capability %d.%d, %d multiprocessors, tier %s", p.name, p.major,
                 p.minor, p.multiProcessorCount, best_tier(&p));
    else
        snprintf(text, capacity, "%s, compute capability %d.%d: not supported, %d.0 is the least", p.name,
                 p.major, p.minor, LEAST_MAJOR);
    return true;
}

static csa_status describe(char *text, size_t capacity)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error != cudaSuccess || count == 0) {
        snprintf(text, capacity, "no GPU: %s", error == cudaSuccess ? "none found" : cudaGetErrorString(error));
        return CSA_ERROR_UNSUPPORTED;
    }
    for (int device = 0; device < count; device++) {
        cudaDeviceProp p;
        if (cudaGetDeviceProperties(&p, device) == cudaSuccess && supported(&p)) {
            snprintf(text, capacity, "%d GPU%s, tiers sm90, portable; device %d: %s", count,
                     count > 1 ? "s" : "", device, p.name);
            return CSA_OK;
        }
    }
    snprintf(text, capacity, "no GPU of compute capability %d.0 or later", LEAST_MAJOR);
    return CSA_ERROR_UNSUPPORTED;
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
    int count = count_devices();
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
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED,
                             "tier %.32s is unknown or does not run on device %d, tiers: %s", tier, (int)device,
                             strcmp(best, "portable") ? "sm90, portable" : best);
    context->stages = &stages;
    context->device = device;
    context->multiprocessors = p.multiProcessorCount;
    context->portable = strcmp(tier ? tier : best, "portable") == 0;
    context->tier = context->portable ? "portable" : "sm90";
    csa_on_device guard(context);
    return load_all();
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
