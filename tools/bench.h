/*
 * csa bench: what was asked for, and what is to be reported.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_H
#define CSA_TOOL_BENCH_H

#include "bench_stages.h"

typedef struct bench_options {
    const char *what; /* decode, prefill, layer, all or a stage */
    bench_shape shape;
    const char *kv, *tier, *list;
    csa_backend backend;
    int64_t threads, samples;
    bool dense, scaling, cold, no_limits, verify, json, csv;
} bench_options;

/* The shapes of a run, in order. */
typedef struct bench_shapes {
    bench_shape *items;
    size_t count;
} bench_shapes;

/* Everything that is reported. */
typedef struct bench_report {
    const bench_options *options;
    char processor[128];
    double load; /* average before the run */
    bench_machine machine;
    bench_limits limits[2]; /* of each number of threads, the largest last */
    int32_t threads[2];
    int teams; /* numbers of threads: 1, or 2 with --scaling */
    csa_backend backend;
    char tier[32];
    bench_run *runs; /* [teams][shapes] */
    size_t count;
} bench_report;

/* Arguments, and the shapes of --list. False if the subcommand is to end with *code. */
bool bench_parse(int argc, char **argv, bench_options *options, bench_shapes *shapes, int *code);

/* The set of items to measure for a shape. */
unsigned bench_items_of(const bench_options *options, const bench_shape *shape);

/* Text comes run by run, JSON and CSV at the end. */
void bench_print_machine(const bench_report *report);
void bench_print_run(const bench_report *report, const bench_run *run);
int bench_print_json(const bench_report *report);
void bench_print_csv(const bench_report *report);

#endif
