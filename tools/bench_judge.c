/*
 * What limits the items of a benchmark.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_stages.h"

/* What a stage called alone moves; where stages are one step, what lies between them stays out of memory. */
static uint64_t all_bytes(const cost *c)
{
    return cost_add(cost_add(c->read, c->written), c->between);
}

typedef struct bound {
    const char *name;
    double seconds;
} bound;

static bound larger(bound a, bound b)
{
    return b.seconds > a.seconds ? b : a;
}

static bound memory_bound(const bench_limits *l, uint64_t bytes, bool cached, bool gathers, bool e4m3)
{
    if (cached)
        return (bound){"cache", (double)bytes / l->cache};
    if (gathers)
        return (bound){"gather", (double)bytes / l->gather[e4m3]};
    return (bound){"stream", (double)bytes / l->stream};
}

/* Scores and attention are dot products of bf16; the rest is not. */
static bound compute_bound(const bench_limits *l, int item, uint64_t operations)
{
    bool dots = item == BENCH_SCORE || item == BENCH_ATTEND || item == BENCH_DENSE;
    if (dots && l->bf16 > 0)
        return (bound){"bf16", (double)operations / l->bf16};
    return (bound){"fp32", l->fp32 > 0 ? (double)operations / l->fp32 : 0}; /* 0: not measured */
}

typedef struct judging {
    const bench_run *run;
    const bench_limits *limits;
    uint64_t cache; /* bytes that stay in caches between samples */
    cost_step costs;
} judging;

static bound bound_of(const judging *j, int item, uint64_t bytes, uint64_t operations)
{
    bool e4m3 = j->run->shape.model.e4m3, cached = bytes <= j->cache;
    bound memory = memory_bound(j->limits, bytes, cached, item == BENCH_ATTEND, e4m3);
    return larger(memory, compute_bound(j->limits, item, operations));
}

/* Stages of a step run one after the other: their limits add up. */
static void judge_step(const judging *j, bench_result *r, int first, int end)
{
    cost total = {0};
    double seconds = 0;
    for (int stage = first; stage < end; stage++) {
        const cost *c = &j->costs.stages[stage];
        if (stage == COST_GATE && !j->run->shape.gate)
            continue;
        total.read = cost_add(total.read, cost_add(c->read, c->written));
        total.operations = cost_add(total.operations, c->operations);
    }
    r->bytes = total.read;
    r->operations = total.operations;
    for (int stage = first; j->limits && stage < end; stage++) {
        const cost *c = &j->costs.stages[stage];
        bool cached = r->bytes <= j->cache; /* the whole step's, since they follow each other */
        if (stage == COST_GATE && !j->run->shape.gate)
            continue;
        bound memory = memory_bound(j->limits, cost_add(c->read, c->written), cached, stage == COST_ATTEND,
                                    j->run->shape.model.e4m3);
        seconds += larger(memory, compute_bound(j->limits, stage, c->operations)).seconds;
    }
    r->limit = j->limits ? "stages" : NULL;
    r->limit_seconds = seconds;
}

static void judge_item(const judging *j, int item, bench_result *r)
{
    const cost *c = item == BENCH_DENSE ? &j->costs.dense : &j->costs.stages[item];
    r->bytes = all_bytes(c);
    r->operations = c->operations;
    if (!j->limits || r->operations == 0)
        return;
    bound b = bound_of(j, item, r->bytes, r->operations);
    r->limit = b.name;
    r->limit_seconds = b.seconds;
}

void bench_judge_limits(bench_run *run, const bench_limits *limits, const bench_machine *machine, bool cold)
{
    const bench_shape *s = &run->shape;
    int64_t tokens = s->rows ? s->rows : s->model.query_len;
    judging j = {
        .run = run,
        .limits = limits,
        .cache = cold || !limits ? 0 : machine->last_cache / 2,
        .costs = cost_of_step(&s->model, s->model.batch, tokens, s->rows > 0),
    };
    for (int item = 0; item < BENCH_ITEMS; item++) {
        bench_result *r = &run->results[item];
        if (item == BENCH_STEP)
            judge_step(&j, r, COST_SCORE, COST_STAGES);
        else if (item == BENCH_LAYER)
            judge_step(&j, r, COST_PREPARE, COST_STAGES);
        else if (item != BENCH_PLAN)
            judge_item(&j, item, r);
    }
}
