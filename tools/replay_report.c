/*
 * csa replay: the table and the JSON object.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const verdicts[REPLAY_VERDICTS] = {"pass",       "agree",      "FAIL", "not compared",
                                                      "not judged", "not a call", "ERROR"};

static long long count_of(const replay *run, replay_verdict verdict)
{
    long long count = 0;
    for (size_t i = 0; i < run->count; i++)
        count += run->results[i].verdict == verdict;
    return count;
}

static const char *verdict_of(int code)
{
    return code == TOOL_OK ? "pass" : code == TOOL_CHECK_FAILED ? "fail" : "error";
}

/* ---- Table -------------------------------------------------------------------------------------- */

/* Names come from files: what a terminal would obey is not printed. */
static void print_cell(const char *text, int width)
{
    int used = 0;
    for (; *text != '\0'; text++, used++)
        putchar((unsigned char)*text < 0x20 || *text == 0x7F ? '?' : *text);
    printf("%*s  ", width > used ? width - used : 0, "");
}

static void print_outcome(const replay_result *r, char *text, size_t size)
{
    int used = 0;
    bool compared = r->verdict <= REPLAY_FAIL;
    if (compared && r->differ == 0 && r->error <= 0)
        used = snprintf(text, size, "exact");
    else if (compared && r->differ > 0)
        used = snprintf(text, size, "%lld of %lld differ", (long long)r->differ, (long long)r->entries);
    if (compared && r->error > 0)
        used += snprintf(text + used, size - (size_t)used, "%s%.2g (limit %.2g)", used > 0 ? ", " : "",
                         r->error, r->limit);
    if (r->note[0] != '\0')
        snprintf(text + used, size - (size_t)used, "%s%s", used > 0 ? " " : "", r->note);
    else
        text[used] = '\0';
}

static void print_time(double seconds)
{
    if (seconds < 0)
        printf("-\n");
    else if (seconds < 1e-3)
        printf("%.1f us\n", seconds * 1e6);
    else
        printf("%.2f ms\n", seconds * 1e3);
}

typedef struct widths {
    int name, op, output, outcome;
} widths;

static int wider(int width, const char *text, int most)
{
    int length = (int)strnlen(text, (size_t)most);
    return length > width ? length : width;
}

static widths measure(const replay *run)
{
    widths w = {4, 2, 6, 6};
    char outcome[384];
    for (size_t i = 0; i < run->count; i++) {
        const replay_result *r = &run->results[i];
        print_outcome(r, outcome, sizeof outcome);
        w.name = wider(w.name, r->name, 32);
        w.op = wider(w.op, r->op, 24);
        w.output = wider(w.output, r->output, 32);
        w.outcome = wider(w.outcome, outcome, 72);
    }
    return w;
}

static void print_row(const widths *w, const char *name, const char *op, const char *output,
                      const char *verdict, const char *outcome)
{
    print_cell(name, w->name);
    print_cell(op, w->op);
    print_cell(output, w->output);
    print_cell(verdict, 12);
    print_cell(outcome, w->outcome);
}

void replay_print_table(const replay *run, int code)
{
    widths w = measure(run);
    const char *file = "";
    for (size_t i = 0; i < run->count; i++) {
        const replay_result *r = &run->results[i];
        if (strcmp(file, r->file) != 0) {
            printf("%s", i > 0 ? "\n" : "");
            print_cell(r->file, 0);
            putchar('\n');
            print_row(&w, "case", "op", "output", "verdict", "result");
            puts("time");
        }
        file = r->file;
        char outcome[384];
        print_outcome(r, outcome, sizeof outcome);
        print_row(&w, r->name, r->op, r->output, verdicts[r->verdict], outcome);
        print_time(r->seconds);
    }
    int threads = csa_context_threads(run->context);
    printf(
        "\n%s: %lld passed, %lld agree, %lld failed, %lld not compared, %lld not judged, %lld errors (%s, %d "
        "thread%s)\n",
        verdict_of(code), count_of(run, REPLAY_PASS), count_of(run, REPLAY_AGREE), count_of(run, REPLAY_FAIL),
        count_of(run, REPLAY_NOT_COMPARED), count_of(run, REPLAY_NOT_JUDGED) + count_of(run, REPLAY_NOT_A_CALL),
        count_of(run, REPLAY_ERROR), csa_backend_name(csa_context_backend(run->context)), threads,
        threads == 1 ? "" : "s");
}

/* ---- JSON --------------------------------------------------------------------------------------- */

/* null for what JSON cannot hold. */
static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *result_object(const replay_result *r)
{
    json_t *object = json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:s}", "file", r->file, "case", r->name,
                               "op", r->op, "output", r->output, "verdict", verdicts[r->verdict], "entries",
                               (json_int_t)r->entries, "differ", (json_int_t)r->differ, "note", r->note);
    if (r->error >= 0) {
        json_object_set_new(object, "error", number(r->error));
        json_object_set_new(object, "limit", number(r->limit));
    }
    if (r->seconds >= 0)
        json_object_set_new(object, "seconds", number(r->seconds));
    return object;
}

void replay_print_json(const replay *run, int code)
{
    json_t *results = json_array();
    for (size_t i = 0; i < run->count; i++)
        json_array_append_new(results, result_object(&run->results[i]));
    json_t *object = json_pack(
        "{s:s, s:i, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:i}", "backend",
        csa_backend_name(csa_context_backend(run->context)), "threads", (int)csa_context_threads(run->context),
        "results", results, "passed", count_of(run, REPLAY_PASS), "agree", count_of(run, REPLAY_AGREE),
        "failed", count_of(run, REPLAY_FAIL), "not_compared", count_of(run, REPLAY_NOT_COMPARED), "not_judged",
        count_of(run, REPLAY_NOT_JUDGED) + count_of(run, REPLAY_NOT_A_CALL), "errors",
        count_of(run, REPLAY_ERROR), "verdict", verdict_of(code), "exit", code);
    json_dumpf(object, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(object);
}
