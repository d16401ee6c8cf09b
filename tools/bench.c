/*
 * csa bench: times of stages and whole steps, and the machine's limits beside them.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a run needs beside its report. */
typedef struct bench {
    bench_options options;
    bench_shapes shapes;
    bench_report report;
    csa_context *contexts[2]; /* of each team */
    bench_setup setups[2];
    const bench_device *device; /* NULL: measures on the host */
} bench;

/* ---- Before the first sample -------------------------------------------------------------------- */

static int make_context(bench *b, int team, int32_t threads)
{
    bench_setup *s = &b->setups[team];
    s->options = (csa_context_options){
        .size = sizeof s->options, .backend = b->options.backend, .threads = threads, .tier = b->options.tier};
    csa_status status = csa_context_create(&s->options, &b->contexts[team]);
    if (status)
        return tool_library_error("bench", "csa_context_create", status);
    s->context = b->contexts[team];
    b->report.threads[team] = b->device ? 0 : csa_context_threads(s->context);
    s->device = b->device;
    return TOOL_OK;
}

/* The device, before a context is made on it: its name and cache are the machine's. */
static int open_device(bench *b)
{
    bench_report *r = &b->report;
    char why[256];
    int code = TOOL_OK;
    if (b->options.backend != CSA_BACKEND_CUDA)
        return TOOL_OK;
    if (csa_backend_describe(CSA_BACKEND_CUDA, why, sizeof why) != CSA_OK)
        return tool_fail(TOOL_UNSUPPORTED, "bench", "the cuda back end cannot be used here: %s", why);
    b->device = bench_device_open(r->processor, sizeof r->processor, &r->machine.last_cache, &code);
    return code;
}

static int make_teams(bench *b)
{
    bench_report *r = &b->report;
    int code = TOOL_OK;
    if (b->options.scaling)
        code = make_context(b, r->teams++, 1);
    if (code == TOOL_OK)
        code = make_context(b, r->teams++, (int32_t)b->options.threads);
    if (code == TOOL_OK && b->options.scaling && r->threads[1] == 1)
        code = tool_fail(TOOL_USAGE, "bench", "--scaling compares one thread with more, and there is one");
    if (code != TOOL_OK)
        return code;
    r->backend = csa_context_backend(b->contexts[0]);
    snprintf(r->tier, sizeof r->tier, "%s", csa_context_tier(b->contexts[0]));
    return TOOL_OK;
}

static int ask_workspace(bench *b, int team, const bench_shape *shape)
{
    csa_serving serving = bench_serving(shape);
    csa_status status = csa_workspace_size(&b->setups[team].options, &serving, &b->setups[team].workspace);
    return status ? tool_library_error("bench", "csa_workspace_size", status) : TOOL_OK;
}

/* What a shape allocates; refused if memory does not hold it. */
static int check_memory(bench *b, int team, const bench_shape *shape, uint64_t *bytes)
{
    int code = ask_workspace(b, team, shape);
    if (code != TOOL_OK)
        return code;
    bench_parts parts =
        bench_parts_of(bench_items_of(&b->options, shape) | (b->options.verify ? 1U << BENCH_ATTEND : 0));
    uint64_t available = b->device ? b->device->available() : bench_available();
    uint64_t machine = b->device || b->report.machine.buffer ? 0 : BENCH_MACHINE_BYTES;
    *bytes = bench_bytes(shape, parts, b->setups[team].workspace);
    if (cost_add(*bytes, machine) > available)
        return tool_fail(TOOL_USAGE, "bench",
                         "context %" PRId64 ", batch %" PRId64 " needs %" PRIu64 " bytes; %" PRIu64
                         " are available",
                         shape->model.context, shape->model.batch, *bytes, available);
    return TOOL_OK;
}

/* Before hours of work end in a refusal. */
static int check_shapes(bench *b)
{
    uint64_t bytes;
    int code = TOOL_OK;
    for (size_t i = 0; i < b->shapes.count && code == TOOL_OK; i++)
        for (int team = 0; team < b->report.teams && code == TOOL_OK; team++)
            code = check_memory(b, team, &b->shapes.items[i], &bytes);
    return code;
}

static int measure_machine(bench *b)
{
    bench_report *r = &b->report;
    r->load = bench_load();
    if (b->device) {
        if (!b->options.no_limits)
            r->limits[0] = b->device->limits();
        return bench_device_check(b->device);
    }
    bench_processor(r->processor, sizeof r->processor);
    if (!bench_machine_open(&r->machine, !b->options.no_limits || b->options.cold))
        return tool_fail(TOOL_INTERNAL, "bench", "no memory to measure the machine with");
    for (int team = 0; team < r->teams && !b->options.no_limits; team++)
        r->limits[team] = bench_measure_limits(&r->machine, r->threads[team]);
    return TOOL_OK;
}

/* ---- A run -------------------------------------------------------------------------------------- */

static int measure_items(bench *b, bench_data *d, bench_run *run, unsigned items)
{
    bench_sampling sampling = {.least = b->options.samples,
                               .cold = b->options.cold ? &b->report.machine : NULL,
                               .threads = run->threads};
    int code = bench_prime(d, items);
    for (int item = 0; item < BENCH_ITEMS && code == TOOL_OK; item++)
        if (items >> item & 1) {
            code = bench_measure(d, item, &sampling, &run->results[item].times);
            run->results[item].measured = code == TOOL_OK;
        }
    return code;
}

static void compare_with_dense(bench_run *run)
{
    const bench_result *dense = &run->results[BENCH_DENSE], *step = &run->results[BENCH_STEP];
    if (!step->measured)
        step = &run->results[BENCH_LAYER];
    if (dense->measured)
        run->dense_ratio = dense->times.median / step->times.median;
}

/* How much faster than the same shape on one thread. */
static void compare_with_one(const bench_run *one, bench_run *run)
{
    for (int item = 0; item < BENCH_ITEMS; item++)
        if (run->results[item].measured)
            run->results[item].scaling = one->results[item].times.median / run->results[item].times.median;
}

static int run_shape(bench *b, int team, const bench_shape *shape, bench_run *run)
{
    unsigned items = bench_items_of(&b->options, shape), verified = b->options.verify ? 1U << BENCH_ATTEND : 0;
    bench_data data = {.count = 0};
    *run = (bench_run){.shape = *shape, .threads = b->report.threads[team]};
    int code = check_memory(b, team, shape, &run->bytes);
    if (code == TOOL_OK)
        code = bench_open(&data, shape, bench_parts_of(items | verified), &b->setups[team]);
    if (code == TOOL_OK && verified)
        code = bench_verify(&data, run);
    if (code == TOOL_OK)
        code = measure_items(b, &data, run, items);
    bench_close(&data);
    if (code != TOOL_OK)
        return code;
    bench_judge_limits(run, b->options.no_limits ? NULL : &b->report.limits[team], &b->report.machine,
                       b->options.cold);
    compare_with_dense(run);
    return TOOL_OK;
}

static int run_shapes(bench *b)
{
    bench_report *r = &b->report;
    bool text = !b->options.json && !b->options.csv;
    size_t shapes = b->shapes.count;
    int code = TOOL_OK;
    r->runs = calloc(shapes * (size_t)r->teams, sizeof *r->runs);
    if (!r->runs)
        return tool_fail(TOOL_INTERNAL, "bench", "no memory for %zu shapes", shapes);
    for (size_t i = 0; i < shapes; i++)
        for (int team = 0; team < r->teams; team++) {
            bench_run *run = &r->runs[r->count];
            code = run_shape(b, team, &b->shapes.items[i], run);
            if (code != TOOL_OK)
                return code;
            if (team > 0)
                compare_with_one(run - 1, run);
            if (text && r->count == 0)
                bench_print_machine(r);
            if (text)
                bench_print_run(r, run);
            r->count++;
        }
    return code;
}

static int measure(bench *b)
{
    int code = open_device(b);
    if (code == TOOL_OK)
        code = make_teams(b);
    if (code == TOOL_OK)
        code = check_shapes(b);
    if (code == TOOL_OK)
        code = measure_machine(b);
    if (code == TOOL_OK)
        code = run_shapes(b);
    if (code == TOOL_OK && b->options.json)
        code = bench_print_json(&b->report);
    if (code == TOOL_OK && b->options.csv)
        bench_print_csv(&b->report);
    return code;
}

int tool_bench(int argc, char **argv)
{
    bench b = {.options = {
                   .shape = {.model = {.context = 131072,
                                       .batch = 1,
                                       .groups = 1,
                                       .heads = 16,
                                       .index_heads = 4,
                                       .query_len = 1,
                                       .topk = CSA_DEFAULT_TOPK,
                                       .block_size = 64}},
                   .kv = "bf16",
                   .samples = 30,
               }};
    int code;
    b.report.options = &b.options;
    if (bench_parse(argc, argv, &b.options, &b.shapes, &code))
        code = measure(&b);
    for (int team = 0; team < 2; team++)
        csa_context_destroy(b.contexts[team]);
    bench_machine_close(&b.report.machine);
    free(b.report.runs);
    free(b.shapes.items);
    return code;
}
