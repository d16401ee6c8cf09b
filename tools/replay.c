/*
 * csa replay: runs recorded calls and compares.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay.h"

#include <fnmatch.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"

static const char help[] =
    "usage: csa replay FILE... [--backend NAME] [--tier T] [--threads N] [--case GLOB] [--write OUT]\n"
    "       [--bench N] [--json]\n"
    "\n"
    "Runs every recorded call of captures and compares the outputs. Attention, scores and selections are also\n"
    "judged by the tool's own arithmetic, so that for these a case needs no recorded output.\n"
    "\n"
    "  --backend NAME  ref, cpu, cuda or default\n"
    "  --tier T        instruction sets of cpu, kernels of cuda, as `csa info` lists them (the best)\n"
    "  --threads N     pieces a call is cut into\n"
    "  --case GLOB     only cases whose name matches; * matches / too\n"
    "  --write OUT     write the inputs with what was computed as a capture (one FILE)\n"
    "  --bench N       time each call N times and report the median\n"
    "  --json          one JSON object instead of the table\n"
    "\n"
    "exit code: 0 if nothing failed and, without --write, something passed; 1 a check failed or nothing was\n"
    "judged; 3 a call is not supported here; 4 a broken capture or an unknown op\n"
    "\n"
    "examples:\n"
    "  csa replay captures/calls/scores.safetensors\n"
    "  csa replay captures/calls/*.safetensors --backend ref --json\n"
    "  csa replay captures/calls/steps.safetensors --case 'decode*' --bench 20\n"
    "  csa replay inputs.safetensors --write complete.safetensors\n";

typedef struct settings {
    tool_operands files;
    csa_backend backend;
    int64_t threads, bench;
    const char *glob, *out, *tier;
    bool json;
} settings;

/* ---- Cases -------------------------------------------------------------------------------------- */

static const struct {
    const char *op;
    replay_function run;
} ops[] = {
    {"prepare_indexer", replay_prepare_indexer},
    {"prepare", replay_prepare},
    {"summarize_prefill", replay_summarize_prefill},
    {"summarize_decode", replay_summarize_decode},
    {"summarize_verify", replay_summarize_verify},
    {"score_decode", replay_score_decode},
    {"select", replay_select},
    {"attend_decode", replay_attend_decode},
    {"gate", replay_gate},
    {"decode_step", replay_decode_step},
    {"prefill_step", replay_prefill_step},
    {"pack", replay_pack},
    {"pack_decode", replay_pack_decode},
    {"score_paged", replay_score_paged},
    {"prefill_metadata", replay_prefill_metadata},
    {"gather", replay_gather},
};

static replay_function find_op(const char *op)
{
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
        if (strcmp(ops[i].op, op) == 0)
            return ops[i].run;
    return NULL;
}

/* A context is data, not a call; its outputs are no less true for that. */
static void keep_context(replay_case *c)
{
    replay_report(c, "-", (replay_result){.verdict = REPLAY_NOT_A_CALL, .seconds = -1, .note = "not a call"});
    for (size_t i = 0; i < c->what->outputs; i++) {
        const capture_tensor *output = &c->what->tensors[c->what->inputs + i];
        replay_keep(c, output->name, output->tensor->view, NULL);
    }
}

static void report_rest(replay_case *c, const char *reason)
{
    for (size_t i = 0; replay_ok(c) && i < c->what->outputs; i++) {
        const char *name = c->what->tensors[c->what->inputs + i].name;
        if (strcmp(name, "reference_regions") == 0)
            reason = "what the reference does with such scores, for information";
        replay_result result = {.verdict = REPLAY_NOT_COMPARED, .seconds = -1};
        snprintf(result.note, sizeof result.note, "%s", reason);
        if (!c->checked[i])
            replay_report(c, name, result);
    }
}

void replay_begin(replay_case *c, replay *run, const char *path, const capture *file, const capture_case *what)
{
    *c = (replay_case){.run = run, .path = path, .what = what, .context = run->context, .seconds = -1};
    c->times = calloc((size_t)run->bench + 1, sizeof *c->times);
    c->checked = calloc(what->outputs + 1, sizeof *c->checked);
    /* No honest case has outputs so much larger than its inputs. */
    c->budget = ((size_t)256 << 20) + 64 * file->file.bytes;
    if (c->times == NULL || c->checked == NULL)
        replay_fault(c, TOOL_INTERNAL, "memory", "out of memory");
}

int replay_run_case(replay *run, const char *path, const capture *file, const capture_case *what)
{
    replay_case c;
    replay_begin(&c, run, path, file, what);
    replay_function function = find_op(what->op);
    if (replay_ok(&c) && function != NULL)
        function(&c);
    else if (strcmp(what->op, "context") == 0)
        keep_context(&c);
    else
        replay_fault(&c, TOOL_BAD_FILE, "op", "%.40s is unknown", what->op);
    report_rest(&c, function != NULL ? "not an output of this op" : "not a call");
    replay_free(&c);
    return c.code;
}

/* ---- Files -------------------------------------------------------------------------------------- */

/* The graver of two exit codes: a file that is broken hides what failed, a failure what is not supported. */
static int graver(int a, int b)
{
    static const int order[] = {TOOL_OK, TOOL_UNSUPPORTED, TOOL_CHECK_FAILED, TOOL_BAD_FILE, TOOL_INTERNAL};
    int found = a;
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++)
        if (order[i] == a || order[i] == b)
            found = order[i];
    return found;
}

static bool wanted(const settings *s, const capture_case *what)
{
    return s->glob == NULL || fnmatch(s->glob, what->name, 0) == 0;
}

/* Inputs and metadata of the cases that were run, and what they computed. */
static int write_capture(const replay *run, const settings *s, const capture *file)
{
    char text[READER_TEXT] = "out of memory";
    size_t count = 0;
    reader_tensor *tensors = calloc(file->file.count + run->kept_count + 1, sizeof *tensors);
    json_t *metadata = json_deep_copy(reader_metadata(&file->file));
    for (size_t i = 0; tensors != NULL && i < file->count; i++) {
        const capture_case *what = &file->cases[i];
        if (!wanted(s, what))
            json_object_del(metadata, what->name);
        for (size_t t = 0; wanted(s, what) && t < what->inputs; t++)
            tensors[count++] = *what->tensors[t].tensor;
    }
    for (size_t i = 0; tensors != NULL && i < run->kept_count; i++)
        tensors[count++] = run->kept[i];
    bool ok = tensors != NULL && metadata != NULL && reader_write(s->out, tensors, count, metadata, text);
    free(tensors);
    json_decref(metadata);
    return ok ? TOOL_OK : tool_fail(TOOL_INTERNAL, "replay", "%s: %s", s->out, text);
}

static int replay_file(replay *run, const settings *s, const char *path)
{
    char text[READER_TEXT];
    capture file;
    int code = TOOL_OK;
    if (!capture_open(path, &file, text))
        return tool_fail(TOOL_BAD_FILE, "replay", "%s: %s", path, text);
    for (size_t i = 0; i < file.count; i++) {
        tool_progress("replay", (int64_t)i, (int64_t)file.count);
        if (wanted(s, &file.cases[i]))
            code = graver(code, replay_run_case(run, path, &file, &file.cases[i]));
    }
    tool_progress("replay", 1, 1);
    if (s->out != NULL)
        code = code == TOOL_OK ? write_capture(run, s, &file)
                               : tool_fail(code, "replay", "%s is not written", s->out);
    capture_close(&file);
    return code;
}

static bool has(const replay *run, replay_verdict verdict)
{
    for (size_t i = 0; i < run->count; i++)
        if (run->results[i].verdict == verdict)
            return true;
    return false;
}

static int replay_files(replay *run, const settings *s)
{
    int code = TOOL_OK;
    for (int i = 0; i < s->files.count; i++)
        code = graver(code, replay_file(run, s, s->files.items[i]));
    if (has(run, REPLAY_FAIL))
        code = graver(code, TOOL_CHECK_FAILED);
    if (code == TOOL_OK && (run->count == 0 || (s->out == NULL && !has(run, REPLAY_PASS))))
        code =
            tool_fail(TOOL_CHECK_FAILED, "replay", run->count == 0 ? "no case matches" : "nothing was judged");
    return code;
}

void replay_end(replay *run)
{
    for (size_t i = 0; i < run->count; i++) {
        free(run->results[i].file);
        free(run->results[i].name);
        free(run->results[i].op);
        free(run->results[i].output);
    }
    for (size_t i = 0; i < run->kept_count; i++) {
        free((char *)run->kept[i].name);
        free(run->kept[i].view.data);
    }
    free(run->results);
    free(run->kept);
    csa_context_destroy(run->context);
}

int tool_replay(int argc, char **argv)
{
    settings s = {.backend = CSA_BACKEND_DEFAULT};
    const tool_option options[] = {
        {"FILE", OPTION_OPERANDS, &s.files, 0, 0},       {"--backend", OPTION_BACKEND, &s.backend, 0, 0},
        {"--tier", OPTION_TEXT, &s.tier, 0, 0},          {"--threads", OPTION_NUMBER, &s.threads, 1, 4096},
        {"--case", OPTION_TEXT, &s.glob, 0, 0},          {"--write", OPTION_TEXT, &s.out, 0, 0},
        {"--bench", OPTION_NUMBER, &s.bench, 1, 100000}, {"--json", OPTION_FLAG, &s.json, 0, 0},
    };
    int code;
    if (!tool_options(argc, argv, options, sizeof options / sizeof options[0], help, &code))
        return code;
    if (s.files.count == 0 || (s.out != NULL && s.files.count > 1))
        return tool_fail(TOOL_USAGE, "replay", s.files.count == 0 ? "which FILE?" : "--write takes one FILE");
    if (s.backend == CSA_BACKEND_REF && s.tier)
        return tool_fail(TOOL_USAGE, "replay", "--tier is for the cpu and cuda back ends");
    replay run = {.bench = s.bench, .write = s.out != NULL};
    run.options = (csa_context_options){
        .size = sizeof run.options, .backend = s.backend, .threads = (int32_t)s.threads, .tier = s.tier};
    csa_status status = csa_context_create(&run.options, &run.context);
    if (status != CSA_OK)
        return tool_library_error("replay", "csa_context_create", status);
    code = replay_files(&run, &s);
    bool nothing = run.count == 0 && code != TOOL_CHECK_FAILED; /* no file could be read */
    if (s.json && !nothing)
        replay_print_json(&run, code);
    else if (!nothing)
        replay_print_table(&run, code);
    replay_end(&run);
    return code;
}
