/*
 * Section 6: the headwise gate alone.
 * SPDX-License-Identifier: Apache-2.0
 */

static void gate_token(void *data, int64_t token)
{
    const csa_gate_args *a = data;
    bool active = !csa_present(&a->active) || csa_bool(&a->active, token);
    for (int64_t head = 0; head < a->out.shape[1]; head++) {
        const uint16_t *attention = csa_at(&a->attention, token, head, 0);
        vf factor = vf_set1(csa_gate_factor(*(const uint16_t *)csa_at(&a->gate, token, head, 0)));
        uint16_t *out = csa_at(&a->out, token, head, 0);
        for (int i = 0; i < CSA_HEAD_SIZE; i += LANES)
            vf_store_bf16(out + i, active ? vf_load_bf16(attention + i) * factor : vf_set1(0));
    }
}

static csa_status gate(const csa_context *context, const csa_gate_args *args)
{
    return csa_parallel_small(context, args->out.shape[0], 25 * args->out.shape[1] + 1, gate_token,
                              (void *)args);
}
