/*
 * Section 3: the softmax that makes a closed region's rows one summary of 256 bytes. Which rows those are, and
 * the tail ring, are the same for all host back ends: summarize_host.c.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../summarize_host.h"
#include "ref.h"

typedef struct running {
    float num[CSA_SUMMARY_SIZE], den[CSA_SUMMARY_SIZE], max;
} running;

static void start(running *r)
{
    memset(r, 0, sizeof *r);
    r->max = -INFINITY;
}

/* The larger one, NaN if either is. */
static float max_or_nan(float a, float b)
{
    return isnan(a) || a > b ? a : b;
}

static void add_row(running *r, const uint16_t *key, const uint16_t *z)
{
    float new_max = r->max;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        new_max = max_or_nan(new_max, csa_bf16_to_float(z[i]));
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
        float scale = r->den[i] > 0 ? expf(r->max - new_max) : 0;
        float weight = expf(csa_bf16_to_float(z[i]) - new_max);
        r->num[i] = r->num[i] * scale + weight * csa_bf16_to_float(key[i]);
        r->den[i] = r->den[i] * scale + weight;
    }
    r->max = new_max;
}

static void finish(const running *r, uint8_t *summary)
{
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        summary[i] = csa_float_to_e4m3(csa_round_bf16(r->num[i] / fmaxf(r->den[i], 1e-20F)));
}

static void summarize(const csa_region_rows *rows, uint8_t *summary)
{
    running r;
    start(&r);
    for (int i = 0; i < rows->count; i++)
        add_row(&r, rows->key[i], rows->z[i]);
    finish(&r, summary);
}

csa_status csa_ref_summarize_decode(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_decode(context, args, summarize);
}

csa_status csa_ref_summarize_verify(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_verify(context, args, summarize);
}

csa_status csa_ref_summarize_prefill(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_prefill(context, args, summarize);
}

csa_status csa_ref_summarize_metadata(const csa_context *context, const csa_summarize_args *args)
{
    return csa_host_summarize_metadata(context, args);
}
