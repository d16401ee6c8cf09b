/*
 * Dense attention of a decode step over a paged cache.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dense.h"
#include "judge.h"

#include <math.h>
#include <string.h>

static void widen(const uint16_t *codes, int64_t count, float *values)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)codes[i] << 16;
        memcpy(&values[i], &bits, sizeof bits);
    }
}

static float dot(const float *a, const float *b)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        sum += a[i] * b[i];
    return sum;
}

/* out = out * keep + value * weight */
static void blend(float *out, float keep, const float *value, float weight)
{
#pragma omp simd
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        out[i] = out[i] * keep + value[i] * weight;
}

static void fold_token(dense_partial *p, float logit, const float *value)
{
    if (logit <= p->max) {
        float weight = expf(logit - p->max);
        p->sum += weight;
        blend(p->out, 1, value, weight);
    } else { /* a new maximum, or NaN, which then stays */
        float keep = expf(p->max - logit);
        p->max = logit;
        p->sum = p->sum * keep + 1;
        blend(p->out, keep, value, 1);
    }
}

/* What an e4m3 code stands for. */
typedef struct code_values {
    float of[256];
} code_values;

static void fill_codes(code_values *values, float scale)
{
    for (int i = 0; i < 256; i++) {
        uint8_t code = (uint8_t)i;
        values->of[i] = scale * (float)judge_value(CSA_E4M3, &code, 0);
    }
}

static void load_row(const dense_step *s, const code_values *codes, int64_t group, int64_t token, float *row)
{
    int64_t block = s->table[token / s->block_size];
    int64_t at = ((block * s->groups + group) * s->block_size + token % s->block_size) * CSA_KV_SIZE;
    if (!s->e4m3) {
        widen((const uint16_t *)s->kv + at, CSA_KV_SIZE, row);
        return;
    }
    for (int i = 0; i < CSA_KV_SIZE; i++)
        row[i] = codes->of[((const uint8_t *)s->kv)[at + i]];
}

/* All heads of a group over tokens [first, end). */
static void fold_part(const dense_step *s, const code_values *codes, const uint16_t *query, int64_t group,
                      int64_t first, int64_t end, dense_partial *partial)
{
    float q[CSA_MAX_HEADS * CSA_HEAD_SIZE], row[CSA_KV_SIZE];
    widen(query + group * s->heads * CSA_HEAD_SIZE, s->heads * CSA_HEAD_SIZE, q);
    for (int64_t h = 0; h < s->heads; h++)
        partial[h] = (dense_partial){.max = -INFINITY};
    for (int64_t token = first; token < end; token++) {
        load_row(s, codes, group, token, row);
        for (int64_t h = 0; h < s->heads; h++)
            fold_token(&partial[h], s->scale * dot(q + h * CSA_HEAD_SIZE, row), row + CSA_HEAD_SIZE);
    }
}

/* Joins the parts of one head, in order; parts are `stride` entries apart. */
static void join_parts(const dense_partial *parts, int64_t count, int64_t stride, float *out)
{
    float max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; i++)
        max = fmaxf(max, parts[i * stride].max);
    memset(out, 0, CSA_HEAD_SIZE * sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        const dense_partial *p = &parts[i * stride];
        float weight = p->sum == 0 ? 0 : expf(p->max - max); /* an empty share */
        sum += p->sum * weight;
        blend(out, 1, p->out, weight);
    }
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        out[i] /= sum;
}

size_t dense_scratch(const dense_step *s)
{
    return (size_t)s->threads * (size_t)s->groups * (size_t)s->heads;
}

void dense_decode(const dense_step *s, const uint16_t *query, dense_partial *scratch, float *out)
{
    int64_t tokens = s->position + 1, rows = s->groups * s->heads, parts = s->threads;
    code_values codes = {{0}};
    if (s->e4m3)
        fill_codes(&codes, s->kv_scale);
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t part = 0; part < parts; part++)
            for (int64_t group = 0; group < s->groups; group++)
                fold_part(s, &codes, query, group, tokens * part / parts, tokens * (part + 1) / parts,
                          scratch + part * rows + group * s->heads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            join_parts(scratch + row, parts, rows, out + row * CSA_HEAD_SIZE);
    }
}
