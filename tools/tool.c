/*
 * What the subcommands share.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tool.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int tool_fail(int code, const char *subcommand, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    /* Names come from files and arguments: what a terminal would obey is not passed on. */
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F)
            *c = '?';
    fflush(stdout);
    fprintf(stderr, "csa %s: %s\n", subcommand, text);
    return code;
}

int tool_library_error(const char *subcommand, const char *call, csa_status status)
{
    char text[1024];
    if (csa_last_error(text, sizeof text) == 0)
        snprintf(text, sizeof text, "%s: %s", call, csa_status_name(status));
    int code = status == CSA_ERROR_UNSUPPORTED ? TOOL_UNSUPPORTED : TOOL_INTERNAL;
    return tool_fail(code, subcommand, "%s", text); /* which begins with the call's name */
}

bool tool_backend(const char *name, csa_backend *backend)
{
    for (int i = CSA_BACKEND_DEFAULT; i <= CSA_BACKEND_CUDA; i++)
        if (strcmp(name, csa_backend_name((csa_backend)i)) == 0) {
            *backend = (csa_backend)i;
            return true;
        }
    return false;
}

bool tool_number(const char *text, int64_t low, int64_t high, int64_t *value)
{
    char *end;
    if (*text != '-' && (*text < '0' || *text > '9'))
        return false;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || number < low || number > high)
        return false;
    *value = number;
    return true;
}

double tool_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void tool_progress(const char *what, int64_t done, int64_t total)
{
    enum { WIDTH = 40 };
    if (total <= 0 || !isatty(STDERR_FILENO))
        return;
    int filled = (int)((double)done / (double)total * WIDTH);
    fprintf(stderr, "\r%s [%.*s%*s] %lld/%lld%s", what, filled, "########################################",
            WIDTH - filled, "", (long long)done, (long long)total, done >= total ? "\n" : "");
    fflush(stderr);
}
