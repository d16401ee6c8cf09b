/*
 * What `csa bench` times.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_stages.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum {
    MOST_SAMPLES = 1000,
    WARM_CALLS = 5 /* of a graph, so that its own launch counts little */
};

static const double cheap_seconds = 0.02; /* samples go on for this long */
static const double slow_seconds = 2;     /* from here on progress is drawn */

/* ---- Running one sample ------------------------------------------------------------------------- */

static csa_status run_prepare(bench_data *d)
{
    return csa_prepare(d->context, &d->prepare);
}

static csa_status run_summarize(bench_data *d)
{
    if (d->prefill)
        return csa_summarize_prefill(d->context, &d->summarize);
    return d->per_request > 1 ? csa_summarize_verify(d->context, &d->summarize)
                              : csa_summarize_decode(d->context, &d->summarize);
}

static csa_status run_score(bench_data *d)
{
    bench_chunk c = {.end = 0};
    csa_status status = CSA_OK;
    while (c.end < d->count && status == CSA_OK) {
        bench_chunk_at(d, c.end, &c);
        status = csa_score(d->context, &c.score);
    }
    return status;
}

static csa_status run_select(bench_data *d)
{
    bench_chunk c = {.end = 0};
    csa_status status = CSA_OK;
    while (c.end < d->count && status == CSA_OK) {
        bench_chunk_at(d, c.end, &c);
        status = csa_select(d->context, &c.select);
    }
    return status;
}

static csa_status run_attend(bench_data *d)
{
    return csa_attend(d->context, &d->attend);
}

static csa_status run_gate(bench_data *d)
{
    return csa_gate(d->context, &d->gate);
}

static csa_status run_plan(bench_data *d)
{
    return csa_plan_prefill(d->context, &d->plan_args, &d->plan);
}

static csa_status run_step(bench_data *d)
{
    return d->prefill ? csa_prefill(d->context, d->plan, &d->step) : csa_decode(d->context, &d->step);
}

static csa_status run_layer(bench_data *d)
{
    return csa_layer(d->context, d->plan, &d->layer);
}

static const struct {
    const char *name;
    csa_status (*run)(bench_data *d);
} table[BENCH_ITEMS] = {
    [BENCH_PREPARE] = {"prepare", run_prepare}, [BENCH_SUMMARIZE] = {"summarize", run_summarize},
    [BENCH_SCORE] = {"score", run_score},       [BENCH_SELECT] = {"select", run_select},
    [BENCH_ATTEND] = {"attend", run_attend},    [BENCH_GATE] = {"gate", run_gate},
    [BENCH_PLAN] = {"plan", run_plan},          [BENCH_STEP] = {"decode", run_step},
    [BENCH_LAYER] = {"layer", run_layer},       [BENCH_DENSE] = {"dense", bench_run_dense},
};

const char *bench_item_name(bench_item item, bool prefill)
{
    return item == BENCH_STEP && prefill ? "prefill" : table[item].name;
}

int bench_run_item(bench_data *d, bench_item item)
{
    csa_status status = table[item].run(d);
    return status ? tool_library_error("bench", bench_item_name(item, d->prefill), status) : TOOL_OK;
}

/* ---- Sampling ----------------------------------------------------------------------------------- */

bench_parts bench_parts_of(unsigned items)
{
    unsigned prepare = 1U << BENCH_PREPARE | 1U << BENCH_SUMMARIZE | 1U << BENCH_LAYER;
    unsigned unranked = 1U << BENCH_PREPARE | 1U << BENCH_SUMMARIZE | 1U << BENCH_GATE;
    unsigned no_kv = 1U << BENCH_SUMMARIZE | 1U << BENCH_SCORE | 1U << BENCH_SELECT | 1U << BENCH_GATE;
    return (bench_parts){
        .prepare = items & prepare,
        .kv = items & ~no_kv,
        .ranked = items & ~unranked,
        .dense = items & 1U << BENCH_DENSE,
    };
}

/* Chunk by chunk, since scores of one chunk only are held. */
int bench_prime(bench_data *d, unsigned items)
{
    bench_chunk c = {.end = 0};
    csa_status status = CSA_OK;
    if (!(items & (1U << BENCH_SELECT | 1U << BENCH_ATTEND)))
        return TOOL_OK;
    while (c.end < d->count && status == CSA_OK) {
        bench_chunk_at(d, c.end, &c);
        status = csa_score(d->context, &c.score);
        if (status == CSA_OK)
            status = csa_select(d->context, &c.select);
    }
    return status ? tool_library_error("bench", "score and select", status) : TOOL_OK;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Between the two nearest samples. */
static double quantile(const double *sorted, int64_t count, double share)
{
    double at = share * (double)(count - 1), below = floor(at);
    int64_t i = (int64_t)below, next = i + 1 < count ? i + 1 : i;
    return sorted[i] + (sorted[next] - sorted[i]) * (at - below);
}

static bench_times times_of(double *seconds, int64_t count)
{
    qsort(seconds, (size_t)count, sizeof *seconds, compare_doubles);
    return (bench_times){
        .median = quantile(seconds, count, 0.5),
        .p10 = quantile(seconds, count, 0.1),
        .p90 = quantile(seconds, count, 0.9),
        .least = seconds[0],
        .samples = count,
    };
}

/* A decode step closes a region one time in eight, and what it costs is counted as an average: where regions
 * are closed, a sample is the mean of eight steps. */
static int steps_of_sample(const bench_data *d, bench_item item)
{
    return !d->prefill && (item == BENCH_SUMMARIZE || item == BENCH_LAYER) ? CSA_REGION : 1;
}

/* Planning is the host's work everywhere. */
static bool on_device(const bench_data *d, bench_item item)
{
    return d->memory.device && item != BENCH_PLAN;
}

/* What a sample on a device replays: calls one behind the other, or a single one, since a second would find the
 * caches warm. */
static int record(bench_data *d, bench_item item, bool cold)
{
    int code = TOOL_OK;
    d->memory.device->begin();
    for (int i = 0; i < (cold ? 1 : WARM_CALLS) && code == TOOL_OK; i++)
        code = bench_run_item(d, item);
    d->memory.device->end();
    return code == TOOL_OK ? bench_device_check(d->memory.device) : code;
}

static int replay(const bench_device *device, bool cold, double *seconds)
{
    *seconds = device->replay(cold) / (cold ? 1 : WARM_CALLS);
    return bench_device_check(device);
}

static int call(bench_data *d, bench_item item, const bench_sampling *s, double *seconds)
{
    if (s->cold && !d->memory.device)
        bench_flush(s->cold, s->threads);
    double start = tool_seconds();
    int code = bench_run_item(d, item);
    *seconds = tool_seconds() - start;
    return code;
}

static int take_sample(bench_data *d, bench_item item, const bench_sampling *s, double *seconds)
{
    int steps = steps_of_sample(d, item), code = TOOL_OK;
    *seconds = 0;
    for (int back = steps - 1; back >= 0 && code == TOOL_OK; back--) {
        if (steps > 1)
            bench_stand(d, back);
        double step;
        code = on_device(d, item) ? replay(d->memory.device, s->cold, &step) : call(d, item, s, &step);
        *seconds += step / steps;
    }
    return code;
}

int bench_measure(bench_data *d, bench_item item, const bench_sampling *s, bench_times *times)
{
    int64_t most = s->least > MOST_SAMPLES ? s->least : MOST_SAMPLES, count = 0;
    double *seconds = calloc((size_t)most, sizeof *seconds);
    if (!seconds)
        return tool_fail(TOOL_INTERNAL, "bench", "no memory for %" PRId64 " samples", most);
    int code = bench_run_item(d, item); /* caches, page tables, threads and clocks warm up */
    if (code == TOOL_OK && on_device(d, item))
        code = record(d, item, s->cold);
    double start = tool_seconds(), elapsed = 0;
    while (code == TOOL_OK && count < most && (count < s->least || elapsed < cheap_seconds)) {
        code = take_sample(d, item, s, &seconds[count++]);
        elapsed = tool_seconds() - start;
        if (elapsed > slow_seconds)
            tool_progress(bench_item_name(item, d->prefill), count, s->least);
    }
    if (code == TOOL_OK)
        *times = times_of(seconds, count);
    free(seconds);
    return code;
}
