# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that only records which of its functions are called, built from the table of the headers.

It exports every symbol of cuda-abi.txt, so it shows where a wrapper really ends. By itself each function succeeds and does nothing, and
cuGetProcAddress answers from the same table; with ``RECORDED_DRIVER`` in the environment each one forwards to that driver's function of the
same name, so that real work can be followed. Those named in ``RECORDED_REFUSES``, with spaces around each, answer INVALID_VALUE; those
named to ``recording_fail`` answer the error given there, until it names others; ``RECORDED_FAILS`` is the same from the first call on, as
``ERROR PERIOD NAMES``. With ``recording_fail_some`` only each call answers so whose number is a multiple of the period.

A driver need not answer cuGetProcAddress with the symbols it exports: with ``RECORDED_INTERNAL`` in the environment it answers with
functions of its own, ``recording_<name asked for>_is_<symbol>``, for each name another one. It is of the newest CUDA, or of that of
``RECORDED_VERSION``, and what is newer it does not know. With ``RECORDED_WIDE_ROWS`` rows of pitched memory take twice what they need.
"""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

from aliquot.paths import build_dir
from cuda_shim.coverage.tables import LEGACY, AbiRow

VERSION_NODE = "RECORDING_1"
"""Version of its symbols, for lookups with dlvsym."""

_SOURCE = r"""
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* More arguments than any function of the driver has; each is passed on as it came. */
#define PARAMETERS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l
#define CALLS 4096u

static _Atomic unsigned made;
static unsigned calls[CALLS];

enum {
#define SYMBOL(symbol) ID_##symbol,
@SYMBOLS@
#undef SYMBOL
	SYMBOLS
};

static const char *const symbols[] = {
#define SYMBOL(symbol) #symbol,
@SYMBOLS@
#undef SYMBOL
};

static const struct { const char *base; int since, per_thread; } rows[] = {
#define ROW(symbol, base, since, per_thread) { #base, since, per_thread },
@ROWS@
#undef ROW
};
#define ROWS (sizeof rows / sizeof *rows)

static int newest = 1 << 30; /* CUDA version that it knows; cuDriverGetVersion tells one that was set */
static long (*real[SYMBOLS])(PARAMETERS);

static void note(unsigned id) { calls[atomic_fetch_add(&made, 1) % CALLS] = id; }

/* As a driver does for tools that subscribe to its calls: the program is called back at the end of one of them, but not from a callback. */
static const char *watched;
static void (*subscriber)(void);

static long call_back(unsigned id, long result)
{
	static __thread int inside;

	if (subscriber && !inside && !strcmp(symbols[id], watched)) {
		inside = 1;
		subscriber();
		inside = 0;
	}
	return result;
}

static int is_named(const char *names, const char *symbol)
{
	char word[128];

	snprintf(word, sizeof word, " %s ", symbol);
	return names && strstr(names, word);
}

static char failing[512];
static long failure;
static unsigned failing_period = 1;
static _Atomic unsigned failing_asked;

static int fails(const char *symbol)
{
	return failing[0] && is_named(failing, symbol) && atomic_fetch_add(&failing_asked, 1) % failing_period == failing_period - 1;
}

#define SYMBOL(symbol)                                                                               \
	long symbol(PARAMETERS)                                                                      \
	{                                                                                            \
		note(ID_##symbol);                                                                   \
		if (fails(#symbol))                                                                  \
			return failure;                                                              \
		return call_back(ID_##symbol, real[ID_##symbol] ? real[ID_##symbol](ARGUMENTS) : 0); \
	}
@SYMBOLS@
#undef SYMBOL

#define ROW(symbol, base, since, per_thread) long recording_##base##_is_##symbol(PARAMETERS) { return symbol(ARGUMENTS); }
@ROWS@
#undef ROW

void recording_clear(void) { made = 0; }
unsigned recording_length(void) { return made; }
void recording_call_back(const char *symbol, void (*callback)(void)) { watched = symbol, subscriber = callback; }
void recording_fail_some(const char *names, int result, unsigned period)
{
	snprintf(failing, sizeof failing, "%s", names);
	failure = result, failing_period = period ? period : 1, failing_asked = 0;
}
void recording_fail(const char *names, int result) { recording_fail_some(names, result, 1); }
unsigned recording_asked(void) { return failing_asked; }
const char *recording_at(unsigned position) { return symbols[calls[position % CALLS]]; }

/* The newest form that is not newer than asked for; of two of one age, the one of the wanted flavour. */
static int row_for(const char *base, int version, int per_thread)
{
	int best = -1;
	for (unsigned n = 0; n < ROWS; n++) {
		if (strcmp(rows[n].base, base) || rows[n].since > version || rows[n].since > newest || (rows[n].per_thread && !per_thread))
			continue;
		if (best < 0 || rows[n].since > rows[best].since || (rows[n].since == rows[best].since && rows[n].per_thread))
			best = (int)n;
	}
	return best;
}

static void *const exported[] = {
#define ROW(symbol, base, since, per_thread) (void *)symbol,
@ROWS@
#undef ROW
};

static void *const internal[] = {
#define ROW(symbol, base, since, per_thread) (void *)recording_##base##_is_##symbol,
@ROWS@
#undef ROW
};

static void *const *answers = exported;

static long answer_v2(PARAMETERS)
{
	const char *base = (const char *)a;
	void **out = (void **)b;
	int *status = (int *)e, version = (int)c, per_thread = (d & 2) != 0;

	(void)f, (void)g, (void)h, (void)i, (void)j, (void)k, (void)l;
	if (!base || !out)
		return 1;
	int row = row_for(base, version, per_thread);
	*out = row >= 0 ? answers[row] : NULL;
	if (status)
		*status = row >= 0 ? 0 : row_for(base, 1 << 30, 1) >= 0 ? 2 : 1;
	return 0;
}

static long answer(PARAMETERS)
{
	long result = answer_v2(a, b, c, d, 0, f, g, h, i, j, k, l);
	(void)e;
	return result == 0 && !*(void **)b ? 500 : result;
}

static long tell_version(PARAMETERS)
{
	(void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h, (void)i, (void)j, (void)k, (void)l;
	*(int *)a = newest;
	return 0;
}

static long refuse(PARAMETERS)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h, (void)i, (void)j, (void)k, (void)l;
	return 1;
}

static long (*make_rows)(PARAMETERS);

static long make_wide_rows(PARAMETERS) { return make_rows(a, b, 2 * c, d, e, f, g, h, i, j, k, l); }

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("RECORDED_DRIVER");
	void *driver = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;

	const char *refuses = getenv("RECORDED_REFUSES"), *version = getenv("RECORDED_VERSION");

	if (path && !driver)
		abort();
	for (unsigned n = 0; driver && n < SYMBOLS; n++)
		real[n] = is_named(refuses, symbols[n]) ? refuse : (long (*)(PARAMETERS))dlsym(driver, symbols[n]);
	const char *fail = getenv("RECORDED_FAILS");
	int error = 0, period = 1, end = 0;

	if (fail && sscanf(fail, "%d %d %n", &error, &period, &end) == 2) {
		char names[256];

		snprintf(names, sizeof names, " %s ", fail + end);
		recording_fail_some(names, error, (unsigned)period);
	}
	if (getenv("RECORDED_INTERNAL"))
		answers = internal;
	if (getenv("RECORDED_WIDE_ROWS")) {
		make_rows = real[ID_cuMemAllocPitch_v2];
		real[ID_cuMemAllocPitch_v2] = make_wide_rows;
	}
	if (version) {
		newest = atoi(version);
		real[ID_cuDriverGetVersion] = tell_version;
	}
	if (!driver) {
		real[ID_cuGetProcAddress] = answer;
		real[ID_cuGetProcAddress_v2] = answer_v2;
	}
}
"""


def build_recording_driver(rows: Collection[AbiRow], library: Path) -> None:
    """Put the driver of these rows at ``library`` in an existing directory. Compiled once for each build directory."""
    listed = "\n".join(f"ROW({row.symbol}, {row.base}, {row.since}, {int(row.flavour != LEGACY)})" for row in rows)
    symbols = "\n".join(f"SYMBOL({symbol})" for symbol in dict.fromkeys(row.symbol for row in rows))
    source = _SOURCE.replace("@ROWS@", listed).replace("@SYMBOLS@", symbols)
    kept = build_dir() / "recording-driver" / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of pytest-xdist share it
        if not kept.exists():
            _compile(source, kept)
    shutil.copy(kept, library)


def _compile(source: str, library: Path) -> None:
    """Compile it; the library is there once it is complete."""
    path, versions, part = (library.with_suffix(suffix) for suffix in (".c", ".map", ".part"))
    path.write_text(source)
    versions.write_text(f"{VERSION_NODE} {{ global: cu*; recording_*; local: *; }};\n")
    command: list[str | Path] = ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", part, path]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", f"-Wl,--version-script={versions}", "-ldl"], check=True)
    part.rename(library)
