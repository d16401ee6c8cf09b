/*
 * csa run: a context, recorded or generated, served through the library, and what that costs in quality and
 * time.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: csa run [--context FILE] [options]\n"
    "\n"
    "Serves a context as an engine would, through a paged cache with a shuffled block table: prefill in "
    "chunks\n"
    "that end anywhere, then decode steps.\n"
    "\n"
    "Without a file the context is generated: passages about topics that come back, and needles, tokens with\n"
    "keys of their own that are asked for while decoding. Whole layer steps run, with speculative drafts of\n"
    "which some are rejected. Prints the time of a step and tokens per second, whether each needle's region\n"
    "was selected, the share of dense attention's softmax mass that the selected regions hold, memory, and\n"
    "what the same costs dense. A short part is run with and without drafts, which must give the same bits.\n"
    "\n"
    "With a file, keys, values and queries are recorded ones: summaries are made by prefill, then one decode\n"
    "step is taken for each recorded query and topk. Prints the share kept (mean over rows and heads), the\n"
    "error against dense attention as relative norm (over all, mean and worst of a row's heads), and the time\n"
    "of a step (median) beside dense attention's. Heads narrower than 192 are padded.\n"
    "\n"
    "Fails (exit 1) if attention over the selected regions is not what it should be, if anything is not "
    "finite,\n"
    "if a needle is missed, if drafts change a bit, or if dense attention is not what the file recorded.\n"
    "\n"
    "  --context FILE     a capture (safetensors) with a case of the op `context`\n"
    "  --topk N[,N...]    historical regions a row attends to, 1 to 1024 (16,32,64,128; generated: one, 128)\n"
    "  --backend B        ref, cpu or default (default)\n"
    "  --tier T           instruction sets of the cpu back end, as `csa info` lists them (the best)\n"
    "  --threads N        threads of the library and of dense attention (as many as OpenMP would use)\n"
    "  --block-size N     tokens of a cache block: 16, 32, 64 or 128 (64)\n"
    "  --chunk N          tokens of a prefill step (509)\n"
    "  --plain-mean       z = 0: a summary is the mean of its region's index keys\n"
    "  --svg OUT          write a heat map of the selections: of the smallest topk, or of the first request\n"
    "  --json             the figures as JSON\n"
    "\n"
    "generated contexts only:\n"
    "  --prompt N         tokens of a request, 64 to 16777216 (8192)\n"
    "  --requests N       (2)\n"
    "  --steps N          decode steps (48)\n"
    "  --drafts N         speculative drafts of a step, 0 to 15 (3)\n"
    "  --needles N        needles of a request (8, or as many as prompt and steps have room for)\n"
    "  --seed N           (1)\n"
    "  --groups N         KV groups, 1 to 8 (1)\n"
    "  --heads N          query heads of a group, 1 to 16 (16)\n"
    "  --index-heads N    index heads of a group, 2 or 4 (4)\n"
    "  --kv T             type of the KV cache, bf16 or e4m3 (bf16)\n"
    "\n"
    "examples:\n"
    "  csa run\n"
    "  csa run --prompt 65536 --requests 1 --topk 512 --groups 4 --kv e4m3\n"
    "  csa run --prompt 4096 --drafts 0 --seed 7 --svg selections.svg\n"
    "  csa run --context captures/smollm2.safetensors\n"
    "  csa run --context captures/smollm2.safetensors --topk 64 --plain-mean --svg real.svg\n"
    "  csa run --context captures/smollm2.safetensors --backend ref --threads 1 --json\n";

const run_bounds run_limits = {.recorded = 1e-6, .dense = 1e-5, .sparse = 4e-3, .sparse_head = 8e-3};

/* ---- Arguments ---------------------------------------------------------------------------------- */

/* What only a generated context has. */
static const char *generated_option(const run_options *o)
{
    const struct {
        const char *name;
        bool said;
    } options[] = {
        {"--prompt", o->prompt != 0}, {"--requests", o->requests != 0}, {"--steps", o->steps != 0},
        {"--drafts", o->drafts >= 0}, {"--needles", o->needles >= 0},   {"--seed", o->seed >= 0},
        {"--groups", o->groups != 0}, {"--heads", o->heads != 0},       {"--index-heads", o->index_heads != 0},
        {"--kv", o->kv != NULL}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (options[i].said)
            return options[i].name;
    return NULL;
}

static int check_options(const run_options *o)
{
    int64_t block = o->block_size;
    if (block != 16 && block != 32 && block != 64 && block != 128)
        return tool_fail(TOOL_USAGE, "run", "--block-size takes 16, 32, 64 or 128, not %" PRId64, block);
    if (o->tier && (o->backend == CSA_BACKEND_REF || o->backend == CSA_BACKEND_CUDA))
        return tool_fail(TOOL_USAGE, "run", "--tier is for the cpu back end");
    if (o->path && generated_option(o))
        return tool_fail(TOOL_USAGE, "run", "%s is for generated contexts, not for a file",
                         generated_option(o));
    if (!o->path && o->topk.count > 1)
        return tool_fail(TOOL_USAGE, "run", "--topk takes one number for a generated context");
    if (o->index_heads == 3)
        return tool_fail(TOOL_USAGE, "run", "--index-heads takes 2 or 4, not 3");
    if (o->kv && strcmp(o->kv, "bf16") != 0 && strcmp(o->kv, "e4m3") != 0)
        return tool_fail(TOOL_USAGE, "run", "--kv takes bf16 or e4m3, not '%s'", o->kv);
    return TOOL_OK;
}

static bool parse(int argc, char **argv, run_options *o, int *code)
{
    const tool_option table[] = {
        {"--context", OPTION_TEXT, &o->path, 0, 0},
        {"--topk", OPTION_LIST, &o->topk, 1, CSA_MAX_TOPK},
        {"--backend", OPTION_BACKEND, &o->backend, 0, 0},
        {"--tier", OPTION_TEXT, &o->tier, 0, 0},
        {"--threads", OPTION_NUMBER, &o->threads, 1, 1024},
        {"--block-size", OPTION_NUMBER, &o->block_size, 1, INT32_MAX},
        {"--chunk", OPTION_NUMBER, &o->chunk, 1, INT32_MAX},
        {"--plain-mean", OPTION_FLAG, &o->plain_mean, 0, 0},
        {"--svg", OPTION_TEXT, &o->svg, 0, 0},
        {"--json", OPTION_FLAG, &o->json, 0, 0},
        {"--prompt", OPTION_NUMBER, &o->prompt, 64, 1 << 24},
        {"--requests", OPTION_NUMBER, &o->requests, 1, 4096},
        {"--steps", OPTION_NUMBER, &o->steps, 1, 1 << 20},
        {"--drafts", OPTION_NUMBER, &o->drafts, 0, 15},
        {"--needles", OPTION_NUMBER, &o->needles, 0, 1024},
        {"--seed", OPTION_NUMBER, &o->seed, 0, INT64_MAX},
        {"--groups", OPTION_NUMBER, &o->groups, 1, CSA_MAX_GROUPS},
        {"--heads", OPTION_NUMBER, &o->heads, 1, CSA_MAX_HEADS},
        {"--index-heads", OPTION_NUMBER, &o->index_heads, 2, 4},
        {"--kv", OPTION_TEXT, &o->kv, 0, 0},
    };
    if (!tool_options(argc, argv, table, sizeof table / sizeof *table, help, code))
        return false;
    *code = check_options(o);
    return *code == TOOL_OK;
}

int tool_run(int argc, char **argv)
{
    /* The chunk is a prime: most chunks end within a region. */
    run_options o = {.block_size = 64, .chunk = 509, .drafts = -1, .needles = -1, .seed = -1};
    int code;
    if (!parse(argc, argv, &o, &code))
        return code;
    return o.path ? run_recorded(&o) : run_generated(&o);
}

/* ---- The verdict -------------------------------------------------------------------------------- */

void run_fail(run_verdict *verdict, const char *format, ...)
{
    va_list arguments;
    if (verdict->failed)
        return;
    va_start(arguments, format);
    vsnprintf(verdict->text, sizeof verdict->text, format, arguments);
    va_end(arguments);
    verdict->failed = true;
}

void run_judge_dense(run_verdict *verdict, const deviation *dense)
{
    double overall = deviation_overall(dense);
    if (!(overall <= run_limits.dense))
        run_fail(verdict, "dense attention in fp32 is %.2g from that in double; rounding explains %g", overall,
                 run_limits.dense);
}

void run_judge_sparse(run_verdict *verdict, const char *what, const deviation *sparse, const deviation *dense,
                      bool bad_list)
{
    double overall = deviation_overall(sparse);
    if (bad_list)
        run_fail(verdict, "%s: a selection is not ascending, or lies past its row", what);
    if (!isfinite(deviation_overall(dense)))
        run_fail(verdict, "%s: the output is not finite", what);
    if (!(overall <= run_limits.sparse) || !(sparse->worst <= run_limits.sparse_head))
        run_fail(verdict, "%s: attention is %.2g (worst head %.2g) from exact; %g (%g) is allowed", what,
                 overall, sparse->worst, run_limits.sparse, run_limits.sparse_head);
}

/* ---- Figures ------------------------------------------------------------------------------------ */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double run_quantile(double *values, int64_t count, double share)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[(int64_t)(share * (double)(count - 1) + 0.5)];
}

double run_median(double *values, int64_t count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

size_t run_tensor_bytes(const csa_tensor *t)
{
    size_t bytes = t->dtype >> 8 & 0xFF ? (t->dtype >> 8 & 0xFF) / 8 : 0;
    for (int32_t i = 0; i < t->ndim; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
}

json_t *run_real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}
