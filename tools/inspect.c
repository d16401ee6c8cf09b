/*
 * csa inspect: what a row selected and why.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "inspect.h"
#include "options.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: csa inspect FILE [--case GLOB] [--row N] [--topk N] [--svg OUT] [options]\n"
    "\n"
    "Shows what a row of a capture's case selected and why: its best regions with their scores, the threshold\n"
    "(the worst selected score), ties at it, scores that are no numbers, the selected regions and, where "
    "queries\n"
    "and KV are there, the share of dense attention's softmax mass they hold. Cases of the ops score_decode,\n"
    "select, attend_decode, decode_step, prefill_step and context can be inspected; others are passed over.\n"
    "Recorded scores and selections are shown where there are some, else the library's.\n"
    "\n"
    "  --case GLOB    only cases whose name matches; * matches / too\n"
    "  --row N        row token * groups + group (the first of those that see most)\n"
    "  --topk N       select anew, 1 to 1024 (the case's own; 16 where it has none)\n"
    "  --best N       regions to list, 0 to 4096 (10)\n"
    "  --svg OUT      write a heat map of all rows' selections, and of the softmax mass; takes one case\n"
    "  --backend B    what computes scores and selections that were not recorded: ref, cpu or default\n"
    "  --json         as JSON\n"
    "\n"
    "examples:\n"
    "  csa inspect captures/calls/steps.safetensors --case decode1 --row 3\n"
    "  csa inspect captures/calls/select.safetensors --json\n"
    "  csa inspect captures/smollm2.safetensors --topk 64 --svg layer15.svg\n";

typedef struct inspector {
    inspect_options options;
    replay run;
    capture file;
    FILE *out;    /* text, which is printed if all went well */
    json_t *list; /* of cases */
    int64_t cases;
} inspector;

/* ---- A case ------------------------------------------------------------------------------------- */

/* The first of those that see most. */
static int64_t default_row(const inspect_view *v)
{
    int64_t best = 0;
    for (int64_t row = 1; row < v->rows; row++)
        if (inspect_seen(v, row) > inspect_seen(v, best))
            best = row;
    return best;
}

static int show_row(inspector *s, inspect_view *v, int64_t row)
{
    inspect_row r;
    bool ok = inspect_row_open(&r, v, row);
    if (ok && s->options.json)
        json_array_append_new(s->list, inspect_json(v, &r, s->options.best));
    else if (ok)
        inspect_print(s->out, v, &r, s->options.best);
    inspect_row_close(&r);
    return ok ? TOOL_OK : tool_fail(TOOL_INTERNAL, "inspect", "out of memory");
}

static bool add_row(heatmap *h, inspect_view *v, int64_t row)
{
    inspect_row r;
    bool ok = inspect_row_open(&r, v, row);
    int64_t width = r.seen < v->columns ? r.seen : v->columns; /* only the last entries are used */
    if (ok)
        heatmap_add(h, row, row, r.seen - 1, v->selected + (row + 1) * v->columns - width, width);
    if (ok && r.mass)
        heatmap_add_mass(h, row, r.seen - 1, r.mass);
    inspect_row_close(&r);
    return ok;
}

static int draw(const inspector *s, inspect_view *v)
{
    heatmap h;
    bool ok = heatmap_open(&h, v->rows, v->regions);
    for (int64_t row = 0; ok && row < v->rows; row++) {
        ok = add_row(&h, v, row);
        tool_progress("heat map", row + 1, v->rows);
    }
    snprintf(h.title, sizeof h.title, "%.100s: what its rows select", v->name);
    snprintf(h.subtitle, sizeof h.subtitle,
             "%s, %" PRId64 " rows, groups: %" PRId64 ", topk %" PRId64 "; scores: %s, selection: %s", v->op,
             v->rows, v->groups, v->topk > 0 ? v->topk : v->columns - 1,
             v->scores_from ? v->scores_from : "none", v->selected_from);
    h.row_name = v->groups > 1 ? "row (token x groups + group)" : "row";
    h.selected_name =
        h.region_bin > 1 || h.row_bin > 1 ? "selected, share of a cell's regions" : "selected regions";
    int code = ok ? heatmap_write(&h, "inspect", s->options.svg)
                  : tool_fail(TOOL_INTERNAL, "inspect", "no memory for a picture");
    heatmap_close(&h);
    return code;
}

static int show_view(inspector *s, inspect_view *v)
{
    int64_t row = s->options.row;
    if (v->rows == 0 || v->regions == 0)
        return tool_fail(TOOL_BAD_FILE, "inspect", "%s: case %.200s has no rows or no regions", s->options.path,
                         v->name);
    if (row >= v->rows)
        return tool_fail(TOOL_USAGE, "inspect", "--row %" PRId64 ": case %.200s has %" PRId64 " rows", row,
                         v->name, v->rows);
    if (s->cases++ > 0 && !s->options.json)
        fputc('\n', s->out);
    int code = show_row(s, v, row >= 0 ? row : default_row(v));
    return code == TOOL_OK && s->options.svg ? draw(s, v) : code;
}

static int show_case(inspector *s, const capture_case *what)
{
    inspect_view *v = calloc(1, sizeof *v); /* large: loaded index queries */
    if (!v)
        return tool_fail(TOOL_INTERNAL, "inspect", "out of memory");
    int code = inspect_load(v, &s->run, &s->options, &s->file, what);
    if (code == TOOL_OK)
        code = show_view(s, v);
    inspect_close(v);
    free(v);
    return code;
}

/* ---- The file ----------------------------------------------------------------------------------- */

static bool wanted(const inspector *s, const capture_case *what)
{
    const char *glob = s->options.glob;
    return inspect_knows(what->op) && (!glob || fnmatch(glob, what->name, 0) == 0);
}

static int check_cases(const inspector *s)
{
    int64_t count = 0;
    for (size_t i = 0; i < s->file.count; i++)
        count += wanted(s, &s->file.cases[i]);
    if (count == 0)
        return tool_fail(TOOL_USAGE, "inspect", "%s has no case %s%sthat could be inspected", s->options.path,
                         s->options.glob ? s->options.glob : "", s->options.glob ? " " : "");
    if (count > 1 && s->options.svg)
        return tool_fail(TOOL_USAGE, "inspect",
                         "--svg takes one case, %" PRId64 " match: choose one with --case", count);
    return TOOL_OK;
}

static int show_file(inspector *s)
{
    int code = check_cases(s);
    for (size_t i = 0; i < s->file.count && code == TOOL_OK; i++)
        if (wanted(s, &s->file.cases[i]))
            code = show_case(s, &s->file.cases[i]);
    return code;
}

/* Text is held back until all went well. */
static int show_text(inspector *s)
{
    char *text = NULL;
    size_t size = 0;
    s->out = open_memstream(&text, &size);
    if (!s->out)
        return tool_fail(TOOL_INTERNAL, "inspect", "out of memory");
    int code = show_file(s);
    if (fclose(s->out) != 0 && code == TOOL_OK)
        code = tool_fail(TOOL_INTERNAL, "inspect", "out of memory");
    if (code == TOOL_OK)
        fwrite(text, 1, size, stdout);
    free(text);
    return code;
}

static int show_json(inspector *s)
{
    s->list = json_array();
    int code = show_file(s);
    if (code != TOOL_OK) {
        json_decref(s->list);
        return code;
    }
    json_t *path = json_string(s->options.path); /* NULL if it is not UTF-8 */
    return tool_print_json("inspect",
                           json_pack("{s:o, s:o}", "file", path ? path : json_null(), "cases", s->list));
}

static int inspect_file(inspector *s)
{
    char text[READER_TEXT];
    csa_status status = csa_context_create(&s->run.options, &s->run.context);
    if (status != CSA_OK)
        return tool_library_error("inspect", "csa_context_create", status);
    if (!capture_open(s->options.path, &s->file, text))
        return tool_fail(TOOL_BAD_FILE, "inspect", "%s: %s", s->options.path, text);
    return s->options.json ? show_json(s) : show_text(s);
}

int tool_inspect(int argc, char **argv)
{
    inspector s = {.options = {.row = -1, .best = 10}};
    inspect_options *o = &s.options;
    tool_operands files = {0};
    const tool_option options[] = {
        {"FILE", OPTION_OPERANDS, &files, 0, 0},          {"--case", OPTION_TEXT, &o->glob, 0, 0},
        {"--row", OPTION_NUMBER, &o->row, 0, INT64_MAX},  {"--topk", OPTION_NUMBER, &o->topk, 1, CSA_MAX_TOPK},
        {"--best", OPTION_NUMBER, &o->best, 0, 4096},     {"--svg", OPTION_TEXT, &o->svg, 0, 0},
        {"--backend", OPTION_BACKEND, &o->backend, 0, 0}, {"--json", OPTION_FLAG, &o->json, 0, 0},
    };
    int code;
    if (!tool_options(argc, argv, options, sizeof options / sizeof options[0], help, &code))
        return code;
    if (files.count != 1)
        return tool_fail(TOOL_USAGE, "inspect", files.count == 0 ? "which FILE?" : "takes one FILE");
    o->path = files.items[0];
    s.run = (replay){.subcommand = "inspect"};
    s.run.options = (csa_context_options){.size = sizeof s.run.options, .backend = o->backend};
    code = inspect_file(&s);
    capture_close(&s.file);
    replay_end(&s.run);
    return code;
}
