/*
 * Section 6: the headwise gate.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ref.h"

uint16_t csa_ref_gated(uint16_t attention, uint16_t gate)
{
    return csa_float_to_bf16(csa_bf16_to_float(attention) * csa_gate_factor(gate));
}

static void gate_token(void *data, int64_t token)
{
    const csa_gate_args *a = data;
    bool active = !csa_present(&a->active) || csa_bool(&a->active, token);
    for (int64_t head = 0; head < a->out.shape[1]; head++) {
        const uint16_t *attention = csa_at(&a->attention, token, head, 0);
        uint16_t gate = *(const uint16_t *)csa_at(&a->gate, token, head, 0);
        uint16_t *out = csa_at(&a->out, token, head, 0);
        for (int i = 0; i < CSA_HEAD_SIZE; i++)
            out[i] = active ? csa_ref_gated(attention[i], gate) : 0;
    }
}

csa_status csa_ref_gate(const csa_context *context, const csa_gate_args *args)
{
    return csa_parallel(context, args->out.shape[0], gate_token, (void *)args);
}
