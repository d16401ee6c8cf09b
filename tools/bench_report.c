/*
 * csa bench: what was measured, as text, JSON and CSV.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"
#include "options.h"
#include "units.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

static double rate(uint64_t amount, const bench_result *r)
{
    return (double)amount / r->times.median / 1e9;
}

/* 0: unknown. */
static double share(const bench_result *r)
{
    return r->limit_seconds / r->times.median;
}

static const char *kv_name(const bench_shape *s)
{
    return s->model.e4m3 ? "e4m3" : "bf16";
}

static const bench_limits *limits_of(const bench_report *report, int team)
{
    return report->options->no_limits ? NULL : &report->limits[team];
}

/* ---- Text --------------------------------------------------------------------------------------- */

static void print_limits(const bench_limits *l)
{
    if (l->threads)
        printf("limits    %d thread%s: ", l->threads, l->threads > 1 ? "s" : "");
    else
        printf("limits    ");
    printf("memory %.1f GB/s, cache %.1f GB/s, regions of 6144 bytes %.1f GB/s, of 3072 "
           "bytes %.1f GB/s,\n          ",
           l->stream / 1e9, l->cache / 1e9, l->gather[0] / 1e9, l->gather[1] / 1e9);
    if (l->bf16 > 0)
        printf("bf16 dot products %.0f GFLOP/s%s", l->bf16 / 1e9, l->fp32 > 0 ? ", " : "");
    if (l->fp32 > 0)
        printf("fp32 %.0f GFLOP/s", l->fp32 / 1e9);
    putchar('\n');
}

void bench_print_machine(const bench_report *report)
{
    bool cold = report->options->cold;
    int threads = report->threads[report->teams - 1];
    printf("machine   %s, last-level cache %s, load average before the run %.1f\n", report->processor,
           units_bytes(report->machine.last_cache).s, report->load);
    printf("back end  %s, tier %s, ", csa_backend_name(report->backend), report->tier);
    if (report->backend != CSA_BACKEND_CUDA)
        printf("%d thread%s, ", threads, threads > 1 ? "s" : "");
    printf("%s caches\n", cold ? "cold" : "warm");
    for (int team = 0; team < report->teams && !report->options->no_limits; team++)
        print_limits(&report->limits[team]);
}

static void print_shape(const bench_run *run)
{
    const cost_model *m = &run->shape.model;
    printf("\ncontext %" PRId64 ", batch %" PRId64 ", %" PRId64 " group%s of %" PRId64 " heads, %" PRId64
           " index heads, topk %" PRId64 ", blocks of %" PRId64 ", %s%s",
           m->context, m->batch, m->groups, m->groups > 1 ? "s" : "", m->heads, m->index_heads, m->topk,
           m->block_size, kv_name(&run->shape), run->shape.gate ? ", gated" : "");
    if (run->shape.rows)
        printf(", %" PRId64 " rows of prefill", run->shape.rows);
    else if (m->query_len > 1)
        printf(", %" PRId64 " tokens a step", m->query_len);
    if (run->threads)
        printf("; %d thread%s, %s\n", run->threads, run->threads > 1 ? "s" : "", units_bytes(run->bytes).s);
    else
        printf("; %s\n", units_bytes(run->bytes).s);
}

static void print_result(const char *name, const bench_result *r, bool scaling)
{
    const bench_times *t = &r->times;
    printf("  %-10s %11s %11s %11s %7" PRId64, name, units_seconds(t->median).s, units_seconds(t->p10).s,
           units_seconds(t->p90).s, t->samples);
    if (r->operations)
        printf(" %9s %8s %8.1f %9.1f", units_bytes(r->bytes).s, units_count(r->operations).s, rate(r->bytes, r),
               rate(r->operations, r));
    if (r->limit)
        printf("  %-6s %5.0f %%", r->limit, 100 * share(r));
    if (scaling && r->scaling > 0)
        printf("  %.2f times one thread", r->scaling);
    putchar('\n');
}

void bench_print_run(const bench_report *report, const bench_run *run)
{
    print_shape(run);
    printf("  %-10s %11s %11s %11s %7s %9s %8s %8s %9s  %-6s %7s\n", "", "median", "p10", "p90", "samples",
           "bytes", "operat.", "GB/s", "GFLOP/s", "limit", "share");
    for (int item = 0; item < BENCH_ITEMS; item++)
        if (run->results[item].measured)
            print_result(bench_item_name(item, run->shape.rows > 0), &run->results[item],
                         report->options->scaling);
    if (run->dense_ratio > 0)
        printf("  dense_ratio %.2f: dense attention's time over the whole step's\n", run->dense_ratio);
    if (run->verified)
        printf("  verified: attention is %.1e from double precision", run->step_error);
    if (run->verified && run->results[BENCH_DENSE].measured)
        printf(", dense attention %.1e", run->dense_error);
    if (run->verified)
        putchar('\n');
    fflush(stdout);
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static json_t *limits_json(const bench_limits *l)
{
    return json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "threads", l->threads, "stream_gb_s",
                     l->stream / 1e9, "cache_gb_s", l->cache / 1e9, "gather_6144_gb_s", l->gather[0] / 1e9,
                     "gather_3072_gb_s", l->gather[1] / 1e9, "bf16_gflop_s", l->bf16 / 1e9, "fp32_gflop_s",
                     l->fp32 / 1e9);
}

static json_t *result_json(const bench_result *r)
{
    const bench_times *t = &r->times;
    json_t *o = json_pack("{s:f, s:f, s:f, s:f, s:I}", "median_seconds", t->median, "p10_seconds", t->p10,
                          "p90_seconds", t->p90, "least_seconds", t->least, "samples", (json_int_t)t->samples);
    if (r->operations) {
        json_object_set_new(o, "bytes", json_integer((json_int_t)r->bytes));
        json_object_set_new(o, "operations", json_integer((json_int_t)r->operations));
        json_object_set_new(o, "gb_s", json_real(rate(r->bytes, r)));
        json_object_set_new(o, "gflop_s", json_real(rate(r->operations, r)));
    }
    if (r->limit) {
        json_object_set_new(o, "limit", json_string(r->limit));
        json_object_set_new(o, "limit_seconds", json_real(r->limit_seconds));
        json_object_set_new(o, "limit_share", json_real(share(r)));
    }
    if (r->scaling > 0)
        json_object_set_new(o, "scaling", json_real(r->scaling));
    return o;
}

static json_t *shape_json(const bench_run *run)
{
    const cost_model *m = &run->shape.model;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:b, s:i, s:I}", "context",
                     (json_int_t)m->context, "batch", (json_int_t)m->batch, "groups", (json_int_t)m->groups,
                     "heads", (json_int_t)m->heads, "index_heads", (json_int_t)m->index_heads, "query_len",
                     (json_int_t)m->query_len, "rows", (json_int_t)run->shape.rows, "topk", (json_int_t)m->topk,
                     "block_size", (json_int_t)m->block_size, "kv", kv_name(&run->shape), "gate",
                     run->shape.gate, "threads", run->threads, "allocated", (json_int_t)run->bytes);
}

static json_t *run_json(const bench_run *run)
{
    json_t *o = shape_json(run), *stages = json_object();
    for (int item = 0; item < BENCH_ITEMS; item++)
        if (run->results[item].measured)
            json_object_set_new(stages, bench_item_name(item, run->shape.rows > 0),
                                result_json(&run->results[item]));
    json_object_set_new(o, "stages", stages);
    if (run->dense_ratio > 0)
        json_object_set_new(o, "dense_ratio", json_real(run->dense_ratio));
    if (run->verified)
        json_object_set_new(o, "attention_error", json_real(run->step_error));
    if (run->verified && run->results[BENCH_DENSE].measured)
        json_object_set_new(o, "dense_error", json_real(run->dense_error));
    return o;
}

/* Of one shape alone, dense_ratio also stands outside; bandwidth_gb_s is what `csa size --bench` reads. */
int bench_print_json(const bench_report *report)
{
    const bench_options *o = report->options;
    int last = report->teams - 1;
    json_t *limits = json_array(), *runs = json_array();
    for (int team = 0; team < report->teams && !o->no_limits; team++)
        json_array_append_new(limits, limits_json(limits_of(report, team)));
    for (size_t i = 0; i < report->count; i++)
        json_array_append_new(runs, run_json(&report->runs[i]));
    json_t *root = json_pack("{s:s, s:s, s:s, s:I, s:f, s:s, s:s, s:i, s:b, s:o, s:o}", "what", o->what,
                             "version", csa_version_string(), "processor", report->processor,
                             "last_cache_bytes", (json_int_t)report->machine.last_cache, "load_average",
                             report->load, "backend", csa_backend_name(report->backend), "tier", report->tier,
                             "threads", report->threads[last], "cold", o->cold, "limits", limits, "runs", runs);
    if (!o->no_limits)
        json_object_set_new(root, "bandwidth_gb_s", json_real(report->limits[last].stream / 1e9));
    if (report->count == (size_t)report->teams && report->runs[last].dense_ratio > 0)
        json_object_set_new(root, "dense_ratio", json_real(report->runs[last].dense_ratio));
    return tool_print_json("bench", root);
}

/* ---- CSV ---------------------------------------------------------------------------------------- */

/* Nothing for what is unknown. */
static void print_field(bool known, double value)
{
    if (known)
        printf(",%.9g", value);
    else
        putchar(',');
}

static void print_csv_result(const bench_report *report, const bench_run *run, int item)
{
    const cost_model *m = &run->shape.model;
    const bench_result *r = &run->results[item];
    printf("%s,%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
           ",%" PRId64 ",%s,%d,%s,%s,%d,%d",
           bench_item_name(item, run->shape.rows > 0), m->context, m->batch, m->groups, m->heads,
           m->index_heads, m->query_len, run->shape.rows, m->topk, m->block_size, kv_name(&run->shape),
           run->shape.gate, csa_backend_name(report->backend), report->tier, run->threads,
           report->options->cold);
    printf(",%" PRId64 ",%.9g,%.9g,%.9g,%.9g", r->times.samples, r->times.median, r->times.p10, r->times.p90,
           r->times.least);
    print_field(r->operations, (double)r->bytes);
    print_field(r->operations, (double)r->operations);
    print_field(r->operations, rate(r->bytes, r));
    print_field(r->operations, rate(r->operations, r));
    printf(",%s", r->limit ? r->limit : "");
    print_field(r->limit, r->limit_seconds);
    print_field(r->limit, share(r));
    print_field(r->scaling > 0, r->scaling);
    print_field(run->dense_ratio > 0, run->dense_ratio);
    putchar('\n');
}

void bench_print_csv(const bench_report *report)
{
    puts("stage,context,batch,groups,heads,index_heads,query_len,rows,topk,block_size,kv,gate,backend,tier,"
         "threads,cold,samples,median_seconds,p10_seconds,p90_seconds,least_seconds,bytes,operations,gb_s,"
         "gflop_s,limit,limit_seconds,limit_share,scaling,dense_ratio");
    for (size_t i = 0; i < report->count; i++)
        for (int item = 0; item < BENCH_ITEMS; item++)
            if (report->runs[i].results[item].measured)
                print_csv_result(report, &report->runs[i], item);
}
