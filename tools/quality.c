/*
 * How good sparse attention is.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "quality.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double widen(uint16_t code)
{
    uint32_t bits = (uint32_t)code << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void quality_widen(const uint16_t *codes, int64_t size, double *values)
{
    for (int64_t i = 0; i < size; i++)
        values[i] = widen(codes[i]);
}

/* ---- Distances ---------------------------------------------------------------------------------- */

static double relative(double error, double norm)
{
    if (error == 0)
        return 0;
    return norm > 0 ? sqrt(error / norm) : INFINITY;
}

void deviation_add(deviation *d, const double *got, const double *want, int64_t size)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < size; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double pair = relative(error, norm);
    d->error += error;
    d->norm += norm;
    d->sum += pair;
    d->worst = pair <= d->worst ? d->worst : pair; /* NaN counts as worst, and stays */
    d->pairs++;
}

double deviation_overall(const deviation *d)
{
    return relative(d->error, d->norm);
}

double deviation_mean(const deviation *d)
{
    return d->pairs ? d->sum / (double)d->pairs : 0;
}

/* ---- Exact attention ---------------------------------------------------------------------------- */

bool exact_open(exact_attention *e, const run_context *source)
{
    size_t rows = (size_t)(source->groups * source->heads);
    *e = (exact_attention){.source = source};
    e->logits = calloc(rows * (size_t)source->tokens, sizeof *e->logits);
    e->max = calloc(rows, sizeof *e->max);
    e->sum = calloc(rows, sizeof *e->sum);
    e->out = calloc(rows * (size_t)source->head_size, sizeof *e->out);
    return e->logits && e->max && e->sum && e->out;
}

void exact_close(exact_attention *e)
{
    free(e->logits);
    free(e->max);
    free(e->sum);
    free(e->out);
}

/* Key or value of a token for a query head. */
static const uint16_t *row_of(const run_context *c, const uint16_t *tensor, int64_t token, int64_t head)
{
    return tensor + (token * c->groups + head / c->heads) * c->head_size;
}

static double logit(const run_context *c, const double *query, int64_t token, int64_t head)
{
    const uint16_t *key = row_of(c, c->key, token, head);
    double sum = 0;
    for (int64_t i = 0; i < c->head_size; i++)
        sum += query[i] * widen(key[i]);
    return (double)c->scale * sum;
}

/* out += exp(logit - max) * value for tokens [first, end). Returns the sum of the exponentials. */
static double fold(const exact_attention *e, int64_t head, int64_t first, int64_t end, double max, double *out)
{
    const run_context *c = e->source;
    const double *logits = e->logits + head * c->tokens;
    double sum = 0;
    for (int64_t t = first; t < end; t++) {
        const uint16_t *value = row_of(c, c->value, t, head);
        double weight = exp(logits[t] - max);
        sum += weight;
        for (int64_t i = 0; i < c->head_size; i++)
            out[i] += weight * widen(value[i]);
    }
    return sum;
}

static double largest(const double *values, int64_t first, int64_t end, double max)
{
    for (int64_t i = first; i < end; i++)
        max = fmax(max, values[i]);
    return max;
}

static void divide(double *values, int64_t size, double by)
{
    for (int64_t i = 0; i < size; i++)
        values[i] /= by;
}

static void dense_head(const exact_attention *e, int64_t query, int64_t head)
{
    const run_context *c = e->source;
    int64_t end = run_context_position(c, query) + 1;
    double q[CSA_HEAD_SIZE], *logits = e->logits + head * c->tokens, *out = e->out + head * c->head_size;
    quality_widen(c->query + (query * c->groups * c->heads + head) * c->head_size, c->head_size, q);
    for (int64_t i = 0; i < end; i++)
        logits[i] = logit(c, q, i, head);
    memset(out, 0, (size_t)c->head_size * sizeof *out);
    e->max[head] = largest(logits, 0, end, -INFINITY);
    e->sum[head] = fold(e, head, 0, end, e->max[head], out);
    divide(out, c->head_size, e->sum[head]);
}

void exact_dense(exact_attention *e, int64_t query)
{
    int64_t rows = e->source->groups * e->source->heads;
#pragma omp parallel for schedule(dynamic)
    for (int64_t head = 0; head < rows; head++)
        dense_head(e, query, head);
}

/* -1 may only stand in front, then regions ascend up to `last`. */
static bool list_is_right(const int64_t *list, int64_t length, int64_t last)
{
    int64_t before = -1;
    for (int64_t i = 0; i < length; i++) {
        bool pad = list[i] == -1 && before == -1;
        if (!pad && (list[i] <= before || list[i] > last))
            return false;
        before = list[i];
    }
    return before == last; /* the current region is always there */
}

/* One past the last token of a region that a query sees. */
static int64_t region_end(int64_t region, int64_t position)
{
    int64_t end = (region + 1) * CSA_REGION;
    return end <= position ? end : position + 1;
}

double exact_sparse(const exact_attention *e, int64_t query, int64_t head, const int64_t *list, int64_t length,
                    double *out)
{
    const run_context *c = e->source;
    int64_t position = run_context_position(c, query);
    double max = -INFINITY, sum = 0;
    if (!list_is_right(list, length, position / CSA_REGION))
        return -1;
    for (int64_t i = 0; i < length; i++)
        if (list[i] >= 0)
            max =
                largest(e->logits + head * c->tokens, list[i] * CSA_REGION, region_end(list[i], position), max);
    memset(out, 0, (size_t)c->head_size * sizeof *out);
    for (int64_t i = 0; i < length; i++)
        if (list[i] >= 0)
            sum += fold(e, head, list[i] * CSA_REGION, region_end(list[i], position), max, out);
    divide(out, c->head_size, sum);
    return sum * exp(max - e->max[head]) / e->sum[head];
}

void exact_add_mass(const exact_attention *e, int64_t query, int64_t head, double *mass)
{
    int64_t position = run_context_position(e->source, query);
    const double *logits = e->logits + head * e->source->tokens;
    for (int64_t t = 0; t <= position; t++)
        mass[t / CSA_REGION] += exp(logits[t] - e->max[head]) / e->sum[head];
}
