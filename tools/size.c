/*
 * csa size: what a serving configuration costs. No device is touched.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cost.h"
#include "options.h"
#include "units.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

static const char help[] =
    "usage: csa size [options]\n"
    "\n"
    "Bytes and operations of a serving configuration, stage by stage, for one layer's decode step (and, with\n"
    "--prefill-rows, a prefill step), what dense attention would need, and the memory held. No device is "
    "needed.\n"
    "Bytes are the least an implementation can move: what enters and leaves the step once, summaries once per\n"
    "request, selected cache rows once per row, and never more than the whole cache once. \"between\" is what\n"
    "stages hand to one another when each is a call of its own. A multiply-add is two operations.\n"
    "\n"
    "  --context N        tokens of each request, the step's own included (131072)\n"
    "  --batch N          requests of a decode step (1)\n"
    "  --groups N         KV groups, 1 to 8 (4)\n"
    "  --heads N          query heads per group, 1 to 16 (16)\n"
    "  --index-heads N    index heads per group, 1 to 8 or 16 (4)\n"
    "  --query-len N      tokens per request and decode step, drafts included (1)\n"
    "  --topk N           historical regions a row attends to, 1 to 1024 (512)\n"
    "  --block-size N     tokens of a block: 16, 32, 64 or 128 (64)\n"
    "  --kv bf16|e4m3     type of the KV cache (bf16)\n"
    "  --prefill-rows N   also a prefill step: N rows of each group, the last N tokens of one request\n"
    "  --layers N         sparse layers, for the figures of a whole model (1; Step-5 has 23)\n"
    "  --bandwidth X      GB/s (10^9 bytes): also print the least time\n"
    "  --bench FILE       take the bandwidth from a JSON object's \"bandwidth_gb_s\"\n"
    "  --json             exact figures as JSON\n"
    "\n"
    "examples:\n"
    "  csa size --bandwidth 4300\n"
    "  csa size --context 1048576 --batch 8 --kv e4m3 --layers 23\n"
    "  csa size --context 32768 --prefill-rows 2048 --json\n";

typedef struct size_options {
    cost_model model;
    int64_t prefill_rows, layers;
    double bandwidth; /* GB/s; 0: unknown */
    const char *kv, *bench;
    bool json;
} size_options;

/* Everything that is printed. */
typedef struct size_report {
    const size_options *options;
    cost_step decode, prefill;        /* of one layer; prefill only with prefill_rows */
    cost_memory memory;               /* of one layer */
    size_t workspace, workspace_cuda; /* on a host back end, on cuda */
} size_report;

/* ---- Arguments ---------------------------------------------------------------------------------- */

static int check_options(const size_options *o)
{
    int64_t block = o->model.block_size;
    if (block != 16 && block != 32 && block != 64 && block != 128)
        return tool_fail(TOOL_USAGE, "size", "--block-size takes 16, 32, 64 or 128, not %" PRId64, block);
    if (o->model.query_len > o->model.context || o->prefill_rows > o->model.context)
        return tool_fail(TOOL_USAGE, "size", "a step of more tokens than --context %" PRId64, o->model.context);
    if (strcmp(o->kv, "bf16") != 0 && strcmp(o->kv, "e4m3") != 0)
        return tool_fail(TOOL_USAGE, "size", "--kv takes bf16 or e4m3, not '%s'", o->kv);
    if (o->bench && o->bandwidth > 0)
        return tool_fail(TOOL_USAGE, "size", "give either --bandwidth or --bench");
    return TOOL_OK;
}

static int read_bandwidth(const char *path, double *bandwidth)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return tool_fail(TOOL_BAD_FILE, "size", "%s:%d: %s", path, error.line, error.text);
    *bandwidth = json_number_value(json_object_get(root, "bandwidth_gb_s"));
    json_decref(root);
    if (!(*bandwidth > 0))
        return tool_fail(TOOL_BAD_FILE, "size", "%s: no positive number \"bandwidth_gb_s\"", path);
    return TOOL_OK;
}

static bool parse(int argc, char **argv, size_options *o, int *code)
{
    cost_model *m = &o->model;
    const tool_option table[] = {
        {"--context", OPTION_NUMBER, &m->context, 1, INT64_MAX},
        {"--batch", OPTION_NUMBER, &m->batch, 1, INT64_MAX},
        {"--groups", OPTION_NUMBER, &m->groups, 1, CSA_MAX_GROUPS},
        {"--heads", OPTION_NUMBER, &m->heads, 1, CSA_MAX_HEADS},
        {"--index-heads", OPTION_NUMBER, &m->index_heads, 1, 16},
        {"--query-len", OPTION_NUMBER, &m->query_len, 1, INT32_MAX},
        {"--topk", OPTION_NUMBER, &m->topk, 1, CSA_MAX_TOPK},
        {"--block-size", OPTION_NUMBER, &m->block_size, 1, INT32_MAX},
        {"--kv", OPTION_TEXT, &o->kv, 0, 0},
        {"--prefill-rows", OPTION_NUMBER, &o->prefill_rows, 1, INT64_MAX},
        {"--layers", OPTION_NUMBER, &o->layers, 1, INT32_MAX},
        {"--bandwidth", OPTION_REAL, &o->bandwidth, 0, 0},
        {"--bench", OPTION_TEXT, &o->bench, 0, 0},
        {"--json", OPTION_FLAG, &o->json, 0, 0},
    };
    if (!tool_options(argc, argv, table, sizeof table / sizeof *table, help, code))
        return false;
    *code = check_options(o);
    if (*code == TOOL_OK && o->bench)
        *code = read_bandwidth(o->bench, &o->bandwidth);
    m->e4m3 = strcmp(o->kv, "e4m3") == 0;
    return *code == TOOL_OK;
}

/* ---- Figures ------------------------------------------------------------------------------------ */

static bool exact(const size_report *r)
{
    uint64_t layers = (uint64_t)r->options->layers, most = INT64_MAX;
    const cost_step *steps[] = {&r->decode, &r->prefill};
    for (int i = 0; i < 2; i++) {
        const cost *c = &steps[i]->total;
        if (!cost_exact(steps[i]) || cost_mul(cost_add(c->read, c->written), layers) > most ||
            cost_mul(c->operations, layers) > most || cost_mul(c->between, layers) > most)
            return false;
    }
    return cost_mul(r->memory.all, layers) <= most;
}

static int ask_workspace(const size_options *o, csa_backend backend, size_t *bytes)
{
    const cost_model *m = &o->model;
    csa_serving serving = {
        .size = sizeof serving,
        .regions = cost_regions(m),
        .decode_tokens = m->batch * m->query_len, /* exact() holds */
        .prefill_tokens = o->prefill_rows,
        .groups = (int32_t)m->groups,
        .heads = (int32_t)m->heads,
        .index_heads = (int32_t)cost_padded_heads(m),
        .block_size = (int32_t)m->block_size,
        .topk = (int32_t)m->topk,
        .kv_dtype = m->e4m3 ? CSA_E4M3 : CSA_BF16,
    };
    csa_context_options options = {.size = sizeof options, .backend = backend};
    csa_status status = csa_workspace_size(&options, &serving, bytes);
    return status ? tool_library_error("size", "csa_workspace_size", status) : TOOL_OK;
}

static int work_out(const size_options *o, size_report *r)
{
    *r = (size_report){.options = o};
    r->decode = cost_of_step(&o->model, o->model.batch, o->model.query_len, false);
    if (o->prefill_rows)
        r->prefill = cost_of_step(&o->model, 1, o->prefill_rows, true);
    r->memory = cost_of_memory(&o->model);
    if (!exact(r))
        return tool_fail(TOOL_USAGE, "size", "these sizes give figures past 2^63");
    int code = ask_workspace(o, CSA_BACKEND_DEFAULT, &r->workspace);
    return code ? code : ask_workspace(o, CSA_BACKEND_CUDA, &r->workspace_cuda);
}

static double least_seconds(const cost *c, const size_options *o)
{
    return ((double)c->read + (double)c->written) / (o->bandwidth * 1e9);
}

static double ratio(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0;
}

/* ---- Text --------------------------------------------------------------------------------------- */

static void print_cost(const char *name, const cost *c)
{
    printf("  %-10s %12s %12s %12s %12s\n", name, units_bytes(c->read).s, units_bytes(c->written).s,
           units_bytes(c->between).s, units_count(c->operations).s);
}

static void print_step(const char *title, const cost_step *s, const size_options *o)
{
    printf("\n%s, one layer\n  %-10s %12s %12s %12s %12s\n", title, "", "read", "written", "between",
           "operations");
    for (int i = 0; i < COST_STAGES; i++)
        print_cost(cost_stage_name(i), &s->stages[i]);
    print_cost("total", &s->total);
    print_cost("dense", &s->dense);
    printf("  dense attention moves %.1f times the bytes of summarize, score, select and attend, "
           "with %.1f times the operations\n",
           ratio(s->dense.read, s->sparse.read + s->sparse.written),
           ratio(s->dense.operations, s->sparse.operations));
    if (o->layers > 1) {
        uint64_t n = (uint64_t)o->layers;
        printf("  all %" PRId64 " layers: %s read, %s written, %s operations\n", o->layers,
               units_bytes(s->total.read * n).s, units_bytes(s->total.written * n).s,
               units_count(s->total.operations * n).s);
    }
    if (o->bandwidth > 0)
        printf("  the bytes alone take at %g GB/s: %s a layer, %s in all; of dense attention %s a layer\n",
               o->bandwidth, units_seconds(least_seconds(&s->total, o)).s,
               units_seconds(least_seconds(&s->total, o) * (double)o->layers).s,
               units_seconds(least_seconds(&s->dense, o)).s);
}

static void print_memory(const size_report *r)
{
    const cost_memory *m = &r->memory;
    const size_options *o = r->options;
    printf("\nmemory of a request, one layer\n");
    printf("  KV cache   %12s\n", units_bytes(m->kv).s);
    printf("  summaries  %12s  (%.1f %% of the KV cache)\n", units_bytes(m->summaries).s,
           100 * ratio(m->summaries, m->kv));
    printf("  ring       %12s\n", units_bytes(m->ring).s);
    printf("  request    %12s\n", units_bytes(m->request).s);
    printf("  %" PRId64 " request%s, %" PRId64 " layer%s: %s\n", o->model.batch, o->model.batch > 1 ? "s" : "",
           o->layers, o->layers > 1 ? "s" : "", units_bytes(m->all * (uint64_t)o->layers).s);
    printf("workspace, shared by all layers: %s, on cuda %s\n", units_bytes(r->workspace).s,
           units_bytes(r->workspace_cuda).s);
}

static void print_text(const size_report *r)
{
    const size_options *o = r->options;
    const cost_model *m = &o->model;
    char title[96];
    printf("context %" PRId64 ", batch %" PRId64 ", %" PRId64 " group%s of %" PRId64 " heads, %" PRId64
           " index heads, topk %" PRId64 ", blocks of %" PRId64 ", %s\n",
           m->context, m->batch, m->groups, m->groups > 1 ? "s" : "", m->heads, m->index_heads, m->topk,
           m->block_size, o->kv);
    snprintf(title, sizeof title, "decode step, batch %" PRId64 ", tokens per request: %" PRId64, m->batch,
             m->query_len);
    print_step(title, &r->decode, o);
    if (o->prefill_rows) {
        snprintf(title, sizeof title, "prefill step, %" PRId64 " tokens of one request", o->prefill_rows);
        print_step(title, &r->prefill, o);
    }
    print_memory(r);
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static json_int_t number(uint64_t value)
{
    return (json_int_t)value; /* exact() holds */
}

static json_t *cost_json(const cost *c)
{
    return json_pack("{s:I, s:I, s:I, s:I}", "read", number(c->read), "written", number(c->written), "between",
                     number(c->between), "operations", number(c->operations));
}

static json_t *step_json(const cost_step *s, const size_options *o)
{
    json_t *stages = json_object();
    for (int i = 0; i < COST_STAGES; i++)
        json_object_set_new(stages, cost_stage_name(i), cost_json(&s->stages[i]));
    json_t *step = json_pack("{s:o, s:o, s:o, s:f, s:f}", "stages", stages, "total", cost_json(&s->total),
                             "dense", cost_json(&s->dense), "dense_byte_ratio",
                             ratio(s->dense.read, s->sparse.read + s->sparse.written), "dense_operation_ratio",
                             ratio(s->dense.operations, s->sparse.operations));
    if (o->bandwidth > 0) {
        json_object_set_new(step, "least_seconds", json_real(least_seconds(&s->total, o)));
        json_object_set_new(step, "dense_least_seconds", json_real(least_seconds(&s->dense, o)));
    }
    return step;
}

static json_t *model_json(const size_options *o)
{
    const cost_model *m = &o->model;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I}", "context",
                     (json_int_t)m->context, "batch", (json_int_t)m->batch, "groups", (json_int_t)m->groups,
                     "heads", (json_int_t)m->heads, "index_heads", (json_int_t)m->index_heads, "query_len",
                     (json_int_t)m->query_len, "topk", (json_int_t)m->topk, "block_size",
                     (json_int_t)m->block_size, "kv", o->kv, "prefill_rows", (json_int_t)o->prefill_rows,
                     "layers", (json_int_t)o->layers);
}

static json_t *memory_json(const size_report *r)
{
    const cost_memory *m = &r->memory;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "kv_per_request", number(m->kv),
                     "summaries_per_request", number(m->summaries), "ring_per_request", number(m->ring),
                     "per_request", number(m->request), "all_requests_and_layers",
                     number(m->all * (uint64_t)r->options->layers), "workspace", number(r->workspace),
                     "workspace_cuda", number(r->workspace_cuda));
}

/* Figures of steps are one layer's; "memory" says what is whose. */
static int print_json(const size_report *r)
{
    const size_options *o = r->options;
    json_t *root = json_pack("{s:o, s:o, s:o}", "configuration", model_json(o), "memory", memory_json(r),
                             "decode", step_json(&r->decode, o));
    if (o->prefill_rows)
        json_object_set_new(root, "prefill", step_json(&r->prefill, o));
    if (o->bandwidth > 0)
        json_object_set_new(root, "bandwidth_gb_s", json_real(o->bandwidth));
    return tool_print_json("size", root);
}

int tool_size(int argc, char **argv)
{
    size_options o = {
        .model = {.context = 131072,
                  .batch = 1,
                  .groups = 4,
                  .heads = 16,
                  .index_heads = 4,
                  .query_len = 1,
                  .topk = CSA_DEFAULT_TOPK,
                  .block_size = 64},
        .layers = 1,
        .kv = "bf16",
    };
    size_report r;
    int code;
    if (!parse(argc, argv, &o, &code))
        return code;
    code = work_out(&o, &r);
    if (code != TOOL_OK)
        return code;
    if (o.json)
        return print_json(&r);
    print_text(&r);
    return TOOL_OK;
}
