/*
 * What the subcommands of `csa` share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_H
#define CSA_TOOL_H

#include <csa/csa.h>

/* Exit codes, as `csa --help` lists them. */
enum {
    TOOL_OK = 0,
    TOOL_CHECK_FAILED = 1,
    TOOL_USAGE = 2,
    TOOL_UNSUPPORTED = 3,
    TOOL_BAD_FILE = 4,
    TOOL_INTERNAL = 5
};

/* Subcommands: argv[0] is the subcommand's name. Each returns an exit code, prints data on stdout and messages
 * on stderr. */
int tool_bench(int argc, char **argv);
int tool_info(int argc, char **argv);
int tool_inspect(int argc, char **argv);
int tool_replay(int argc, char **argv);
int tool_run(int argc, char **argv);
int tool_size(int argc, char **argv);

/* Prints "csa SUBCOMMAND: text" on stderr and returns code. */
__attribute__((format(printf, 3, 4))) int tool_fail(int code, const char *subcommand, const char *format, ...);

/* Prints the library's last error for a failed call and returns the exit code that fits the status. */
int tool_library_error(const char *subcommand, const char *call, csa_status status);

/* "ref", "cpu", "cuda", "default" -> back end; false for anything else. */
bool tool_backend(const char *name, csa_backend *backend);

/* Whole decimal number in [low, high]; false for anything else. */
bool tool_number(const char *text, int64_t low, int64_t high, int64_t *value);

/* Monotonic time in seconds. */
double tool_seconds(void);

/* A progress bar on stderr, drawn only if stderr is a terminal; done == total ends it. */
void tool_progress(const char *what, int64_t done, int64_t total);

#endif
