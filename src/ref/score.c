/*
 * Section 4: index scores and the metadata of rows.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ref.h"

/* Exact in double: products of e4m3 values have 8 bits, their sum over 256 fits in 53. Rounded once. */
static float dot(const uint8_t *query, const uint8_t *summary)
{
    double sum = 0;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        sum += (double)csa_e4m3_to_float(query[i]) * (double)csa_e4m3_to_float(summary[i]);
    return (float)sum;
}

/* Head h goes through chain h % 4; fmaxf takes NaN to 0. Heads that only pad would add +0 to a chain. */
float csa_ref_score_summary(const uint8_t *query, int64_t stride, const float *weights, int64_t heads,
                            const uint8_t *summary)
{
    float chain[4] = {0, 0, 0, 0};
    for (int64_t head = 0; head < heads; head++)
        chain[head % 4] = fmaf(weights[head], fmaxf(0, dot(query + head * stride, summary)), chain[head % 4]);
    return ((chain[0] + chain[1]) + chain[2]) + chain[3];
}

static void score_row(void *data, int64_t row)
{
    const csa_score_args *a = data;
    int64_t groups = a->query.shape[1], token = row / groups, group = row % groups;
    bool active = csa_token_active(a->tokens, token);
    int64_t position = active ? csa_token_position(a->tokens, token) : 0;
    if (a->rows_out)
        csa_write_row(a->rows_out, row, active, position);
    if (!csa_present(&a->scores))
        return;
    int64_t request = csa_token_owner(a->tokens, token), last = a->scores.shape[1] - 1;
    if (last > position / CSA_REGION)
        last = position / CSA_REGION;
    float *scores = csa_at(&a->scores, row, 0, 0);
    const float *weights = csa_at(&a->weights, token, group, 0);
    const uint8_t *query = csa_at(&a->query, token, group, 0);
    int64_t heads = a->query.shape[2];
    for (int64_t region = 0; region <= last; region++) {
        const uint8_t *summary = csa_summary_at(a->tokens, a->cache, request, region);
        scores[region] =
            summary ? csa_ref_score_summary(query, a->query.stride[2], weights, heads, summary) : 0;
    }
}

csa_status csa_ref_score(const csa_context *context, const csa_score_args *args)
{
    return csa_parallel(context, args->query.shape[0] * args->query.shape[1], score_row, (void *)args);
}
