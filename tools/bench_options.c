/*
 * csa bench: arguments and lists of shapes.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench.h"
#include "options.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: csa bench decode|prefill|layer|all|STAGE [options]\n"
    "\n"
    "Times stages (prepare, summarize, score, select, attend, gate), called one by one, and whole steps, over "
    "a\n"
    "synthetic paged cache with a shuffled block table. Prints the median, the 10th and 90th percentile, "
    "bytes\n"
    "and operations, and the share of what binds: the machine's limits are measured in the same run, on the\n"
    "same threads. docs/BENCH.md says how to read it.\n"
    "\n"
    "  --context N        tokens of each request, the step's own included (131072)\n"
    "  --batch N          requests (1)\n"
    "  --groups N         KV groups, 1 to 8 (1)\n"
    "  --heads N          query heads per group, 1 to 16 (16)\n"
    "  --index-heads N    index heads per group, 1 to 8 or 16; prepare, layer and all: 2 or 4 (4)\n"
    "  --query-len N      tokens per request of a decode step, drafts included (1)\n"
    "  --rows N           tokens per request of a prefill step (prefill: 2048; otherwise a decode step)\n"
    "  --topk N           historical regions a row attends to, 1 to 1024 (512)\n"
    "  --block-size N     tokens of a block: 16, 32, 64 or 128 (64)\n"
    "  --kv bf16|e4m3     type of the KV cache (bf16)\n"
    "  --gate             attention with its gate\n"
    "  --list FILE        one shape a line, as the options above; those given here are defaults\n"
    "  --dense            also dense attention over the same cache, by the library's own kernel\n"
    "  --scaling          with one thread and with all, and the ratio\n"
    "  --cold             flush the caches before each sample\n"
    "  --verify           first compare attention with double precision (slow: for small shapes)\n"
    "  --samples N        samples at least (30)\n"
    "  --no-limits        do not measure the machine\n"
    "  --backend B        ref, cpu, cuda or default (default)\n"
    "  --tier T           instruction sets of cpu, kernels of cuda, as `csa info` lists them (the best)\n"
    "  --threads N        threads (as many as OpenMP would use)\n"
    "  --json, --csv      for programs\n"
    "\n"
    "examples:\n"
    "  csa bench decode --dense\n"
    "  csa bench score --context 1048576 --cold --scaling\n"
    "  csa bench all --groups 4 --kv e4m3 --json\n"
    "  csa bench decode --backend cuda --batch 8 --gate\n"
    "  csa bench prefill --rows 512 --context 32768\n";

enum { MOST_WORDS = 40, DEFAULT_ROWS = 2048, SHAPE_OPTIONS = 11, ALL_OPTIONS = SHAPE_OPTIONS + 13 };

/* ---- What is measured --------------------------------------------------------------------------- */

enum {
    WHOLE_STEP = 1 << BENCH_STEP,
    STEP_STAGES = 1 << BENCH_SCORE | 1 << BENCH_SELECT | 1 << BENCH_ATTEND,
    LAYER_STAGES = STEP_STAGES | 1 << BENCH_PREPARE | 1 << BENCH_SUMMARIZE
};

static const struct {
    const char *name;
    unsigned items;
} subjects[] = {
    {"decode", STEP_STAGES | WHOLE_STEP},
    {"prefill", STEP_STAGES | WHOLE_STEP},
    {"layer", LAYER_STAGES | 1 << BENCH_LAYER},
    {"all", LAYER_STAGES | 1 << BENCH_GATE | WHOLE_STEP | 1 << BENCH_LAYER},
    {"prepare", 1 << BENCH_PREPARE},
    {"summarize", 1 << BENCH_SUMMARIZE},
    {"score", 1 << BENCH_SCORE},
    {"select", 1 << BENCH_SELECT},
    {"attend", 1 << BENCH_ATTEND},
    {"gate", 1 << BENCH_GATE},
};

static unsigned items_named(const char *what)
{
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++)
        if (strcmp(subjects[i].name, what) == 0)
            return subjects[i].items;
    return 0;
}

unsigned bench_items_of(const bench_options *o, const bench_shape *shape)
{
    unsigned whole = WHOLE_STEP | 1U << BENCH_LAYER, set = items_named(o->what);
    if (shape->rows && set & whole)
        set |= 1U << BENCH_PLAN;
    if (o->dense) /* and what it is compared with */
        set |= 1U << BENCH_DENSE | (set & whole ? 0 : WHOLE_STEP);
    return set;
}

/* ---- Arguments ---------------------------------------------------------------------------------- */

/* What csa_prepare and csa_score take, in the option's words. */
static int check_index_heads(const bench_options *o, const bench_shape *s, const char *where)
{
    int64_t heads = s->model.index_heads;
    bool prepared = bench_items_of(o, s) & (1U << BENCH_PREPARE | 1U << BENCH_LAYER);
    if (prepared && heads != 2 && heads != 4)
        return tool_fail(TOOL_USAGE, where, "--index-heads takes 2 or 4 for %s, not %" PRId64, o->what, heads);
    if (heads > 8 && heads != 16)
        return tool_fail(TOOL_USAGE, where, "--index-heads takes 1 to 8 or 16, not %" PRId64, heads);
    return TOOL_OK;
}

/* Where a shape stands ("bench" or "bench: FILE:LINE") begins the message. */
static int check_shape(const bench_options *o, const bench_shape *s, const char *where)
{
    const cost_model *m = &s->model;
    int64_t block = m->block_size, tokens = s->rows ? s->rows : m->query_len;
    if (block != 16 && block != 32 && block != 64 && block != 128)
        return tool_fail(TOOL_USAGE, where, "--block-size takes 16, 32, 64 or 128, not %" PRId64, block);
    if (tokens > m->context)
        return tool_fail(TOOL_USAGE, where, "a step of %" PRId64 " tokens is more than --context %" PRId64,
                         tokens, m->context);
    if (s->rows && strcmp(o->what, "decode") == 0)
        return tool_fail(TOOL_USAGE, where, "--rows is for prefill steps; decode takes --query-len");
    if (cost_mul(m->batch, (m->context - 1) / block + 1) > INT32_MAX)
        return tool_fail(TOOL_USAGE, where, "more blocks than a block table can number");
    return check_index_heads(o, s, where);
}

/* Defaults that depend on others, then the check. */
static int finish_shape(const bench_options *o, const char *kv, bench_shape *s, const char *where)
{
    if (strcmp(kv, "bf16") != 0 && strcmp(kv, "e4m3") != 0)
        return tool_fail(TOOL_USAGE, where, "--kv takes bf16 or e4m3, not '%s'", kv);
    s->model.e4m3 = strcmp(kv, "e4m3") == 0;
    if (strcmp(o->what, "prefill") == 0 && !s->rows)
        s->rows = s->model.context < DEFAULT_ROWS ? s->model.context : DEFAULT_ROWS;
    return check_shape(o, s, where);
}

static void shape_table(bench_shape *s, const char **kv, tool_option table[SHAPE_OPTIONS])
{
    cost_model *m = &s->model;
    const tool_option options[SHAPE_OPTIONS] = {
        {"--context", OPTION_NUMBER, &m->context, 1, (int64_t)1 << 36},
        {"--batch", OPTION_NUMBER, &m->batch, 1, 1 << 20},
        {"--groups", OPTION_NUMBER, &m->groups, 1, CSA_MAX_GROUPS},
        {"--heads", OPTION_NUMBER, &m->heads, 1, CSA_MAX_HEADS},
        {"--index-heads", OPTION_NUMBER, &m->index_heads, 1, 16},
        {"--query-len", OPTION_NUMBER, &m->query_len, 1, 1024},
        {"--rows", OPTION_NUMBER, &s->rows, 1, 1 << 20},
        {"--topk", OPTION_NUMBER, &m->topk, 1, CSA_MAX_TOPK},
        {"--block-size", OPTION_NUMBER, &m->block_size, 1, INT32_MAX},
        {"--kv", OPTION_TEXT, kv, 0, 0},
        {"--gate", OPTION_FLAG, &s->gate, 0, 0},
    };
    memcpy(table, options, sizeof options);
}

static bool parse_arguments(int argc, char **argv, bench_options *o, int *code)
{
    tool_operands operands = {0};
    tool_option table[ALL_OPTIONS];
    const tool_option options[ALL_OPTIONS - SHAPE_OPTIONS] = {
        {"WHAT", OPTION_OPERANDS, &operands, 0, 0},
        {"--list", OPTION_TEXT, &o->list, 0, 0},
        {"--dense", OPTION_FLAG, &o->dense, 0, 0},
        {"--scaling", OPTION_FLAG, &o->scaling, 0, 0},
        {"--cold", OPTION_FLAG, &o->cold, 0, 0},
        {"--verify", OPTION_FLAG, &o->verify, 0, 0},
        {"--samples", OPTION_NUMBER, &o->samples, 1, 1000000},
        {"--no-limits", OPTION_FLAG, &o->no_limits, 0, 0},
        {"--backend", OPTION_BACKEND, &o->backend, 0, 0},
        {"--tier", OPTION_TEXT, &o->tier, 0, 0},
        {"--threads", OPTION_NUMBER, &o->threads, 1, 1024},
        {"--json", OPTION_FLAG, &o->json, 0, 0},
        {"--csv", OPTION_FLAG, &o->csv, 0, 0},
    };
    shape_table(&o->shape, &o->kv, table);
    memcpy(table + SHAPE_OPTIONS, options, sizeof options);
    if (!tool_options(argc, argv, table, ALL_OPTIONS, help, code))
        return false;
    if (operands.count == 1)
        o->what = operands.items[0];
    if (operands.count != 1 || !items_named(o->what))
        *code = tool_fail(TOOL_USAGE, "bench",
                          "needs one of decode, prefill, layer, all, prepare, summarize, "
                          "score, select, attend, gate");
    return *code == TOOL_OK;
}

/* ---- Lists -------------------------------------------------------------------------------------- */

static bool add_shape(bench_shapes *shapes, const bench_shape *shape)
{
    bench_shape *items = realloc(shapes->items, (shapes->count + 1) * sizeof *items);
    if (!items)
        return false;
    shapes->items = items;
    items[shapes->count++] = *shape;
    return true;
}

/* Cuts a line into words behind words[0], which says where it stands; a comment ends it. Returns the count. */
static int split(char *line, char *words[MOST_WORDS])
{
    int count = 1;
    char *rest = line;
    line[strcspn(line, "#\r\n")] = '\0';
    for (char *word = strtok_r(line, " \t", &rest); word && count < MOST_WORDS;
         word = strtok_r(NULL, " \t", &rest))
        words[count++] = word;
    return count;
}

static int parse_words(const bench_options *o, int count, char **words, bench_shapes *shapes)
{
    bench_shape shape = o->shape;
    const char *kv = o->kv;
    tool_option table[SHAPE_OPTIONS];
    int code;
    for (int i = 1; i < count; i++)
        if (strcmp(words[i], "--help") == 0 || strcmp(words[i], "-h") == 0)
            return tool_fail(TOOL_BAD_FILE, words[0], "%s belongs to the command line", words[i]);
    shape_table(&shape, &kv, table);
    if (!tool_options(count, words, table, SHAPE_OPTIONS, help, &code))
        return TOOL_BAD_FILE;
    if (finish_shape(o, kv, &shape, words[0]) != TOOL_OK)
        return TOOL_BAD_FILE;
    return add_shape(shapes, &shape) ? TOOL_OK : tool_fail(TOOL_INTERNAL, "bench", "no memory for shapes");
}

static int read_list(const bench_options *o, FILE *file, bench_shapes *shapes)
{
    char line[1024], where[512], *words[MOST_WORDS] = {where};
    int code = TOOL_OK;
    for (int number = 1; code == TOOL_OK && fgets(line, sizeof line, file); number++) {
        bool whole = strchr(line, '\n') || feof(file);
        snprintf(where, sizeof where, "bench: %.400s:%d", o->list, number);
        int count = split(line, words);
        if (!whole)
            code = tool_fail(TOOL_BAD_FILE, where, "a line of more than %zu characters", sizeof line - 2);
        else if (count == MOST_WORDS)
            code = tool_fail(TOOL_BAD_FILE, where, "too many words");
        else if (count > 1)
            code = parse_words(o, count, words, shapes);
    }
    if (code == TOOL_OK && shapes->count == 0)
        code = tool_fail(TOOL_BAD_FILE, "bench", "%s: no shapes", o->list);
    return code;
}

static int make_shapes(const bench_options *o, bench_shapes *shapes)
{
    bench_shape shape = o->shape;
    int code = finish_shape(o, o->kv, &shape, "bench");
    if (code != TOOL_OK)
        return code;
    if (!o->list)
        return add_shape(shapes, &shape) ? TOOL_OK : tool_fail(TOOL_INTERNAL, "bench", "no memory for shapes");
    FILE *file = fopen(o->list, "r");
    if (!file)
        return tool_fail(TOOL_BAD_FILE, "bench", "%s: cannot be opened", o->list);
    code = read_list(o, file, shapes);
    fclose(file);
    return code;
}

bool bench_parse(int argc, char **argv, bench_options *o, bench_shapes *shapes, int *code)
{
    if (!parse_arguments(argc, argv, o, code))
        return false;
    if (o->json && o->csv)
        *code = tool_fail(TOOL_USAGE, "bench", "give either --json or --csv");
    else if (o->scaling && o->threads == 1)
        *code = tool_fail(TOOL_USAGE, "bench", "--scaling compares one thread with more");
    else if (o->backend == CSA_BACKEND_REF && o->tier)
        *code = tool_fail(TOOL_USAGE, "bench", "--tier is for the cpu and cuda back ends");
    else if (o->backend == CSA_BACKEND_CUDA && (o->dense || o->scaling || o->verify))
        *code = tool_fail(TOOL_USAGE, "bench", "--dense, --scaling and --verify are for back ends of the host");
    else
        *code = make_shapes(o, shapes);
    return *code == TOOL_OK;
}
