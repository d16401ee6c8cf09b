/*
 * What `csa bench` times: stages, whole steps and dense attention, each with what it costs and what limits it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_STAGES_H
#define CSA_TOOL_BENCH_STAGES_H

#include "bench_data.h"
#include "bench_limits.h"

/* In the order of the flow; the stages as in cost.h. */
typedef enum bench_item {
    BENCH_PREPARE = COST_PREPARE,
    BENCH_SUMMARIZE = COST_SUMMARIZE,
    BENCH_SCORE = COST_SCORE,
    BENCH_SELECT = COST_SELECT,
    BENCH_ATTEND = COST_ATTEND,
    BENCH_GATE = COST_GATE,
    BENCH_PLAN = COST_STAGES,
    BENCH_STEP, /* csa_decode or csa_prefill */
    BENCH_LAYER,
    BENCH_DENSE,
    BENCH_ITEMS
} bench_item;

/* Of the times of the samples, in seconds. */
typedef struct bench_times {
    double median, p10, p90, least;
    int64_t samples;
} bench_times;

typedef struct bench_result {
    bool measured;
    bench_times times;
    uint64_t bytes, operations; /* 0 where nothing is counted: plan */
    const char *limit; /* what binds: "stream", "cache", "gather", "bf16", "fp32", "stages"; NULL: unknown */
    double limit_seconds;
    double scaling; /* the median of one thread over that of all; 0: not asked for */
} bench_result;

typedef struct bench_run {
    bench_shape shape;
    int32_t threads;
    uint64_t bytes; /* allocated */
    bench_result results[BENCH_ITEMS];
    double dense_ratio;             /* dense attention's time over the whole step's; 0: not asked for */
    bool verified;                  /* the errors below are known */
    double step_error, dense_error; /* relative norms against double precision */
} bench_run;

/* How to sample. */
typedef struct bench_sampling {
    int64_t least;             /* samples; more are taken while that costs little time */
    const bench_machine *cold; /* not NULL: caches are flushed before each sample */
    int32_t threads;
} bench_sampling;

/* "score"; of BENCH_STEP "decode" or "prefill". */
const char *bench_item_name(bench_item item, bool prefill);

/* Parts of the memory that some items need; items is a set of bits 1 << item. */
bench_parts bench_parts_of(unsigned items);

/* Runs what the items read: scores before selections before attention. Exit code. */
int bench_prime(bench_data *data, unsigned items);

/* Runs one once. Exit code. */
int bench_run_item(bench_data *data, bench_item item);

/* Warms up, takes samples. Exit code. */
int bench_measure(bench_data *data, bench_item item, const bench_sampling *sampling, bench_times *times);

/* Fills bytes, operations and, with limits, limit and limit_seconds of all items. Warm caches count if what an
 * item moves fits into them. */
void bench_judge_limits(bench_run *run, const bench_limits *limits, const bench_machine *machine, bool cold);

/* Compares attention and dense attention with double precision; needs both primed. Exit code. */
int bench_verify(bench_data *data, bench_run *run);

#endif
