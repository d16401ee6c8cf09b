/*
 * Section 6: the headwise gate alone.
 *
 * A warp per (token, head): 192 values, three pairs a lane. Bound by memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../numeric.h"
#include "launch.h"
#include "stages.h"

enum { WARPS = 8 };

static __global__ void gate_kernel(csa_gate_args a)
{
    int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, heads = a.out.shape[1];
    int lane = threadIdx.x % 32;
    int64_t token = item / heads, head = item % heads;
    if (token >= a.out.shape[0])
        return;
    bool active = !csa_present(&a.active) || csa_bool(&a.active, token);
    const uint16_t *attention = (const uint16_t *)csa_at(&a.attention, token, head, 0);
    uint16_t *out = (uint16_t *)csa_at(&a.out, token, head, 0);
    float factor = csa_gate_factor(*(const uint16_t *)csa_at(&a.gate, token, head, 0));
    for (int i = lane; i < CSA_HEAD_SIZE; i += 32)
        out[i] = active ? csa_float_to_bf16(csa_bf16_to_float(attention[i]) * factor) : 0;
}

csa_status csa_cuda_load_gate(void)
{
    return csa_load("gate", gate_kernel, 0);
}

csa_status csa_cuda_gate(const csa_context *context, const csa_gate_args *args)
{
    (void)context;
    csa_status status = csa_cuda_check_rows(args->out.shape[0], args->out.shape[1]);
    int64_t items = args->out.shape[0] * args->out.shape[1];
    if (status != CSA_OK || items == 0)
        return status;
    csa_launch l;
    l.grid = dim3((unsigned)((items + WARPS - 1) / WARPS));
    l.block = dim3(32 * WARPS);
    l.stream = args->stream;
    return csa_queue("gate", gate_kernel, l, *args);
}
