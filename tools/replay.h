/*
 * `csa replay`: what its parts share. An op's function takes inputs (replay_input), allocates outputs
 * (replay_output), makes calls (REPLAY_CALL) and checks what came out (replay_check...). The first fault of a
 * case sticks: from then on inputs and outputs are absent tensors and calls and checks do nothing, so that only
 * code that reads tensors itself has to ask replay_ok first.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_REPLAY_H
#define CSA_REPLAY_H

#include <csa/csa.h>

#include "capture.h"
#include "judge.h"
#include "tool.h"

/* ---- The run and its results -------------------------------------------------------------------- */

typedef enum replay_verdict {
    REPLAY_PASS,
    REPLAY_AGREE, /* two of our own results, which proves nothing about either */
    REPLAY_FAIL,
    REPLAY_NOT_COMPARED,
    REPLAY_NOT_JUDGED,
    REPLAY_NOT_A_CALL,
    REPLAY_ERROR, /* the case could not be run */
    REPLAY_VERDICTS
} replay_verdict;

typedef struct replay_result {
    char *file, *name, *op, *output;
    replay_verdict verdict;
    int64_t entries, differ; /* compared, and those that differ in any bit */
    double error, limit;     /* in the unit that note names; negative: compared for equality alone */
    char note[200];
    double seconds; /* of the call; negative: none */
} replay_result;

typedef struct replay {
    const char *subcommand; /* that messages come from; NULL: replay */
    csa_context *context;
    csa_context_options options; /* of the context */
    int64_t bench;               /* timed repetitions of each call; 0: none */
    bool write;
    replay_result *results;
    size_t count, capacity;
    reader_tensor *kept; /* what --write is going to write; names and data are owned */
    size_t kept_count, kept_capacity;
} replay;

/* Prints the table or the JSON object, and the verdict. */
void replay_print_table(const replay *run, int code);
void replay_print_json(const replay *run, int code);

/* ---- A case ------------------------------------------------------------------------------------- */

typedef struct replay_block replay_block;

typedef struct replay_case {
    replay *run;
    const char *path;
    const capture_case *what;
    csa_context *context;
    int code;             /* TOOL_OK or the exit code of the first fault */
    replay_block *blocks; /* memory of outputs */
    size_t budget;        /* bytes that may still be allocated */
    int64_t calls;        /* runs of the present REPLAY_CALL so far */
    double *times;        /* of its runs: room for 1 + bench */
    double started;
    double seconds; /* of the last REPLAY_CALL: the median */
    bool *checked;  /* per recorded output */
    bool keep_only; /* checks compare and report nothing, but keep outputs for --write */
} replay_case;

/* Runs a case: finds its op and reports what was recorded but not compared. Returns the case's exit code. */
int replay_run_case(replay *run, const char *path, const capture *file, const capture_case *what);

/* Makes a case ready for the functions below; replay_free is to be called even if it is at fault then. */
void replay_begin(replay_case *c, replay *run, const char *path, const capture *file, const capture_case *what);

/* Frees what a run has gathered, and its context. */
void replay_end(replay *run);

/* Frees what a case has allocated, after a look at its guards. */
void replay_free(replay_case *c);

static inline bool replay_ok(const replay_case *c)
{
    return c->code == TOOL_OK;
}

/* Says what is wrong with a case; sticks. `subject` names the tensor or scalar. */
__attribute__((format(printf, 4, 5))) void replay_fault(replay_case *c, int code, const char *subject,
                                                        const char *format, ...);

/* ---- Scalars. A missing or impossible one is a fault (exit 4) and reads as the lowest value ----- */

/* A list of `count` int32 numbers, as a tensor. */
csa_tensor replay_list(replay_case *c, const char *name, int64_t count);

int64_t replay_integer(replay_case *c, const char *name, int64_t low, int64_t high);
double replay_real(replay_case *c, const char *name);
bool replay_flag(replay_case *c, const char *name, bool otherwise);

/* ---- Tensors ------------------------------------------------------------------------------------ */

enum { REPLAY_ANY = -1 };

/* Extents as an argument pair, REPLAY_ANY for whatever there is: REPLAY_SHAPE(rows, REPLAY_ANY). */
#define REPLAY_SHAPE(...)                                                            \
    (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) \
    {                                                                                \
        __VA_ARGS__                                                                  \
    }

bool replay_has(const replay_case *c, const char *name);
bool replay_recorded(const replay_case *c, const char *name);

/* An input, or an output as it was recorded; a fault unless it has this dtype and shape. */
csa_tensor replay_input(replay_case *c, const char *name, csa_dtype dtype, int32_t ndim, const int64_t *shape);
csa_tensor replay_record(replay_case *c, const char *name, csa_dtype dtype, int32_t ndim, const int64_t *shape);

/* Memory that lasts as long as the case, all 0xFF, with guards round it. A fault if it is more than any honest
 * capture of this size would need. */
csa_tensor replay_output(replay_case *c, csa_dtype dtype, int32_t ndim, const int64_t *shape);

/* The same, with the elements of a contiguous tensor. */
csa_tensor replay_copy(replay_case *c, csa_tensor tensor);

/* Elements of a tensor; 0 for an absent one. */
int64_t replay_elements(const csa_tensor *tensor);

/* The first `count` of the first extent, from `first` on. */
csa_tensor replay_rows(csa_tensor tensor, int64_t first, int64_t count);

/* ---- Calls -------------------------------------------------------------------------------------- */

/* Runs a call and, with --bench, times it `bench` times more; outputs are then those of the first run. Its
 * status is checked, and its time is what later checks report. */
#define REPLAY_CALL(c, call) \
    while (replay_next(c))   \
    replay_ran((c), #call, (call))

bool replay_next(replay_case *c);
void replay_ran(replay_case *c, const char *call, csa_status status);

/* ---- Checks ------------------------------------------------------------------------------------- */

/* How an output is compared: limits, if not NULL, has for each i the number of leading elements of [i, ...]
 * that are specified. */
typedef struct replay_tolerance {
    int64_t steps;         /* codes that a few entries may be apart; 0: none may differ */
    const int64_t *limits; /* NULL: everything is specified */
    bool free_size;        /* the first extent follows from data: another one fails, but is no fault */
    bool nan_as_lowest;    /* a NaN of ours may be recorded as the lowest e4m3 number (section 8) */
} replay_tolerance;

#define REPLAY_EXACT ((replay_tolerance){0})

/* Compares an output with its recording, if there is one, and keeps it for --write. */
void replay_check(replay_case *c, const char *name, csa_tensor got, replay_tolerance tolerance);

/* Compares with what the tool knows itself to be right and with the recording, if there is one. Keeps nothing.
 */
void replay_check_judged(replay_case *c, const char *name, csa_tensor got, csa_tensor expected);

/* Are two of our own results the same in every specified entry? `what` is the row's name in the table. */
void replay_agree(replay_case *c, const char *what, csa_tensor a, csa_tensor b, const int64_t *limits);

/* Keeps an output for --write, unspecified entries as 0; a later one of that name replaces it. */
void replay_keep(replay_case *c, const char *name, csa_tensor got, const int64_t *limits);

/* Says why a recorded output, if there is one, is not compared. */
void replay_skip(replay_case *c, const char *name, const char *reason);

/* Reports a row of the table; result needs verdict, numbers and note only. */
void replay_report(replay_case *c, const char *output, replay_result result);

/* A recorded output, for a check of its own kind; marks it as compared. Absent if there is none; a fault unless
 * it has the dtype and shape of `like`, or is a corner of that. */
csa_tensor replay_take(replay_case *c, const char *name, csa_tensor like);

/* Score (row, region) by its definition. */
typedef struct replay_scorer {
    void (*score)(void *data, int64_t row, int64_t region, float *score, double *bound);
    void *data;
    const int64_t *limits; /* per row: regions that are specified */
    const uint8_t *wrong;  /* per row: nonzero where the recording is known to be wrong; NULL: nowhere */
} replay_scorer;

/* Judges scores fp32 [R, regions], those of `got` and the recorded ones, both against the definition. */
void replay_check_scores(replay_case *c, const char *name, csa_tensor got, replay_scorer scorer);

/* The same for scores that are not what was recorded. */
void replay_judge_scores(replay_case *c, const char *what, csa_tensor got, replay_scorer scorer);

/* Judges a selection int64 [R, width + 1] by a plain sort, and compares it with the recorded one. */
void replay_check_selected(replay_case *c, const char *name, csa_tensor got, csa_tensor scores,
                           const int64_t *current, int64_t topk);

/* Judges attention bf16 [R, heads, 192] by exact arithmetic, and compares it with the recorded one. rows: one
 * per token and group. */
void replay_check_attention(replay_case *c, const char *name, csa_tensor got, const judge_attend_args *args,
                            const judge_row *rows, int64_t groups);

/* The same for attention that is not what was recorded. */
void replay_judge_attention(replay_case *c, const char *what, csa_tensor got, const judge_attend_args *args,
                            const judge_row *rows, int64_t groups);

/* ---- Ops ---------------------------------------------------------------------------------------- */

typedef void (*replay_function)(replay_case *c);

void replay_prepare_indexer(replay_case *c);
void replay_prepare(replay_case *c);
void replay_summarize_prefill(replay_case *c);
void replay_summarize_decode(replay_case *c);
void replay_summarize_verify(replay_case *c);
void replay_score_decode(replay_case *c);
void replay_select(replay_case *c);
void replay_attend_decode(replay_case *c);
void replay_gate(replay_case *c);
void replay_decode_step(replay_case *c);
void replay_prefill_step(replay_case *c);
void replay_pack(replay_case *c);
void replay_pack_decode(replay_case *c);
void replay_score_paged(replay_case *c);
void replay_prefill_metadata(replay_case *c);
void replay_gather(replay_case *c);

#endif
