/*
 * Dense attention of a decode step by the library's own kernel: csa_attend over slices of all regions, merged
 * by their log-sum-exp.
 *
 * A request's slices are rows of one call, so that they spread over all threads. Each row stands at the
 * position of its token, therefore every entry of its list is live. SPDX-License-Identifier: Apache-2.0
 */
#include "bench_data.h"

#include <math.h>
#include <string.h>

enum { SLICE = CSA_MAX_TOPK /* regions of a slice at most */ };

void bench_lay_out_dense(bench_data *d)
{
    const cost_model *m = &d->shape.model;
    bench_dense *s = &d->dense;
    int64_t regions = (m->context - 1) / CSA_REGION + 1;
    s->slices = (regions + SLICE - 1) / SLICE;
    s->columns = (regions + s->slices - 1) / s->slices;
    int64_t tokens = d->count * s->slices, rows = tokens * m->groups, heads = m->groups * m->heads;
    size_t vector = CSA_HEAD_SIZE * sizeof(uint16_t);
    s->positions = bench_take(&d->memory, BENCH_EMPTY, sizeof *s->positions, tokens, 1);
    s->owners = bench_take(&d->memory, BENCH_EMPTY, sizeof *s->owners, tokens, 1);
    s->lists = bench_take(&d->memory, BENCH_EMPTY, sizeof *s->lists, rows, s->columns);
    s->query = bench_take(&d->memory, BENCH_EMPTY, vector, tokens, heads);
    s->partial = bench_take(&d->memory, BENCH_EMPTY, vector, tokens, heads);
    s->lse = bench_take(&d->memory, BENCH_EMPTY, sizeof *s->lse, tokens, heads);
    s->out = bench_take(&d->memory, BENCH_EMPTY, vector, d->count, heads);
    s->tokens = (csa_tokens){
        .size = sizeof s->tokens,
        .block_table = d->tokens.block_table,
        .positions = csa_tensor_1d(s->positions, CSA_I64, tokens),
        .owners = csa_tensor_1d(s->owners, CSA_I64, tokens),
    };
    s->attend = (csa_attend_args){
        .size = sizeof s->attend,
        .tokens = &s->tokens,
        .cache = &d->cache,
        .query = csa_tensor_4d(s->query, CSA_BF16, tokens, m->groups, m->heads, CSA_HEAD_SIZE),
        .selected = csa_tensor_2d(s->lists, CSA_I64, rows, s->columns),
        .out = csa_tensor_4d(s->partial, CSA_BF16, tokens, m->groups, m->heads, CSA_HEAD_SIZE),
        .lse = csa_tensor_3d(s->lse, CSA_F32, tokens, m->groups, m->heads),
        .scale = d->attend.scale,
    };
}

/* Slice number `slice` of a token whose last region is `last`, after any number of -1. */
static void write_list(const bench_dense *s, int64_t slice, int64_t last, int64_t *list)
{
    int64_t first = slice * s->columns, end = first + s->columns < last + 1 ? first + s->columns : last + 1;
    for (int64_t i = 0; i < s->columns; i++) {
        int64_t region = end - s->columns + i;
        list[i] = region < first ? -1 : region;
    }
}

void bench_fill_dense(bench_data *d)
{
    bench_dense *s = &d->dense;
    int64_t groups = d->shape.model.groups, values = groups * d->shape.model.heads * CSA_HEAD_SIZE;
    const uint16_t *query = d->attend.query.data;
    for (int64_t i = 0; i < d->count * s->slices; i++) {
        int64_t token = i / s->slices;
        s->positions[i] = d->positions[token];
        s->owners[i] = d->owners[token];
        memcpy(s->query + i * values, query + token * values, (size_t)values * sizeof *query);
        for (int64_t g = 0; g < groups; g++)
            write_list(s, i % s->slices, d->positions[token] / CSA_REGION,
                       s->lists + (i * groups + g) * s->columns);
    }
}

static uint16_t round_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* finite here */
}

static void add_weighted(const uint16_t *partial, float weight, float *sum)
{
#pragma omp simd
    for (int i = 0; i < CSA_HEAD_SIZE; i++) {
        uint32_t bits = (uint32_t)partial[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        sum[i] += weight * value;
    }
}

/* Joins the slices of one head of one token. */
static void merge_head(const bench_dense *s, int64_t heads, int64_t token, int64_t head)
{
    int64_t first = token * s->slices * heads + head;
    float sum[CSA_HEAD_SIZE] = {0}, most = -INFINITY, weights = 0;
    for (int64_t i = 0; i < s->slices; i++)
        most = fmaxf(most, s->lse[first + i * heads]);
    for (int64_t i = 0; i < s->slices; i++) {
        float weight = expf(s->lse[first + i * heads] - most);
        weights += weight;
        add_weighted(s->partial + (first + i * heads) * CSA_HEAD_SIZE, weight, sum);
    }
    uint16_t *out = s->out + (token * heads + head) * CSA_HEAD_SIZE;
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        out[i] = round_bf16(sum[i] / weights);
}

csa_status bench_run_dense(bench_data *d)
{
    const bench_dense *s = &d->dense;
    int64_t heads = d->shape.model.groups * d->shape.model.heads, rows = d->count * heads;
    csa_status status = csa_attend(d->context, &s->attend);
#pragma omp parallel for num_threads(csa_context_threads(d->context)) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        merge_head(s, heads, row / heads, row % heads);
    return status;
}
