/*
 * csa run: dense attention by the library's own kernels, so that the comparison is with a good one: csa_attend
 * over all regions, in lists as long as it takes, joined by their log-sum-exps.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_generated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Attention of the last step's tokens to everything, in slices. */
typedef struct slices {
    int64_t rows, heads;    /* (token, group) pairs; heads of all of them */
    int64_t columns, count; /* regions of a slice, and slices */
    int64_t *lists;         /* [count, rows, columns] */
    uint16_t *out;          /* bf16 [count, heads, 192] */
    float *lse;             /* [count, heads] */
} slices;

/* A row reads no more entries of a list than it has regions: no slice may be longer than that. */
static void lay_out(slices *s, const engine *e)
{
    int64_t fewest = CSA_MAX_TOPK + 1, most = 0;
    for (int64_t i = 0; i < e->count; i++) {
        int64_t regions = e->positions[i] / CSA_REGION + 1;
        fewest = regions < fewest ? regions : fewest;
        most = regions > most ? regions : most;
    }
    *s = (slices){.rows = e->count * e->groups, .columns = fewest, .count = (most - 1) / fewest + 1};
    s->heads = s->rows * e->heads;
}

/* Regions past a row's position contribute nothing. */
static bool fill(slices *s)
{
    s->lists = calloc((size_t)(s->count * s->rows), (size_t)s->columns * sizeof *s->lists);
    s->out = calloc((size_t)(s->count * s->heads), CSA_HEAD_SIZE * sizeof *s->out);
    s->lse = calloc((size_t)(s->count * s->heads), sizeof *s->lse);
    if (!s->lists || !s->out || !s->lse)
        return false;
    for (int64_t i = 0; i < s->count * s->rows * s->columns; i++)
        s->lists[i] = i / (s->rows * s->columns) * s->columns + i % s->columns;
    return true;
}

static csa_status attend_slice(const engine *e, const slices *s, int64_t slice)
{
    int64_t tokens = e->count, heads = slice * s->heads;
    csa_attend_args args = {
        .size = sizeof args,
        .tokens = &e->tokens,
        .cache = &e->cache,
        .query = csa_tensor_4d(e->in.query, CSA_BF16, tokens, e->groups, e->heads, CSA_HEAD_SIZE),
        .selected = csa_tensor_2d(s->lists + slice * s->rows * s->columns, CSA_I64, s->rows, s->columns),
        .out =
            csa_tensor_4d(s->out + heads * CSA_HEAD_SIZE, CSA_BF16, tokens, e->groups, e->heads, CSA_HEAD_SIZE),
        .lse = csa_tensor_3d(s->lse + heads, CSA_F32, tokens, e->groups, e->heads),
        .scale = 1 / sqrtf(CSA_HEAD_SIZE),
    };
    return csa_attend(e->context, &args);
}

static void join_head(const slices *s, int64_t head, float *out)
{
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < s->count; i++)
        most = fmaxf(most, s->lse[i * s->heads + head]);
    memset(out, 0, CSA_HEAD_SIZE * sizeof *out);
    for (int64_t i = 0; i < s->count; i++) {
        float weight = expf(s->lse[i * s->heads + head] - most);
        const uint16_t *part = s->out + (i * s->heads + head) * CSA_HEAD_SIZE;
        sum += weight;
#pragma omp simd
        for (int j = 0; j < CSA_HEAD_SIZE; j++) {
            uint32_t bits = (uint32_t)part[j] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            out[j] += weight * value;
        }
    }
    for (int j = 0; j < CSA_HEAD_SIZE; j++)
        out[j] /= sum;
}

static int attend(const engine *e, const slices *s, float *out)
{
    for (int64_t i = 0; i < s->count; i++) {
        csa_status status = attend_slice(e, s, i);
        if (status)
            return tool_library_error("run", "csa_attend", status);
    }
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < s->heads; head++)
        join_head(s, head, out + head * CSA_HEAD_SIZE);
    return TOOL_OK;
}

int run_dense_step(const engine *e, int64_t repeats, float *out, double *best)
{
    slices s;
    lay_out(&s, e);
    int code = fill(&s) ? TOOL_OK : tool_fail(TOOL_INTERNAL, "run", "no memory for dense attention");
    *best = INFINITY;
    for (int64_t i = 0; i < repeats && code == TOOL_OK; i++) {
        double start = tool_seconds();
        code = attend(e, &s, out);
        *best = fmin(*best, tool_seconds() - start);
    }
    free(s.lists);
    free(s.out);
    free(s.lse);
    return code;
}
