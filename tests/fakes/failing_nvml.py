# SPDX-License-Identifier: Apache-2.0
"""An NVML before the driver's own that can be made to fail: it has the functions that the shim calls while it counts memory.

``FAILING_NVML`` is the driver's library. Functions named to ``failing_nvml_fail`` answer the error given there, each call or only those
whose number is a multiple of the period; ``FAILING_NVML_FAILS`` is the same from the first call on, as ``ERROR PERIOD NAMES``.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from aliquot import contract

_SOURCE = r"""
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARAMETERS long a, long b, long c, long d
#define ARGUMENTS a, b, c, d

static char failing[512];
static long failure;
static unsigned failing_period = 1;
static _Atomic unsigned failing_asked;
static void *driver;

static int fails(const char *symbol)
{
	char word[128];

	snprintf(word, sizeof word, " %s ", symbol);
	return strstr(failing, word) && atomic_fetch_add(&failing_asked, 1) % failing_period == failing_period - 1;
}

#define SYMBOL(symbol)                                                                             \
	long symbol(PARAMETERS)                                                                    \
	{                                                                                          \
		return fails(#symbol) ? failure : ((long (*)(PARAMETERS))dlsym(driver, #symbol))(ARGUMENTS); \
	}
@SYMBOLS@

void failing_nvml_fail(const char *names, int error, unsigned period)
{
	snprintf(failing, sizeof failing, " %s ", names);
	failure = error, failing_period = period, failing_asked = 0;
}
unsigned failing_nvml_asked(void) { return failing_asked; }

__attribute__((constructor)) static void open_driver(void)
{
	const char *fail = getenv("FAILING_NVML_FAILS");
	int error = 0, period = 1, end = 0;

	driver = dlopen(getenv("FAILING_NVML"), RTLD_NOW | RTLD_LOCAL);
	if (!driver)
		abort();
	if (fail && sscanf(fail, "%d %d %n", &error, &period, &end) == 2)
		failing_nvml_fail(fail + end, error, (unsigned)period);
}
"""


def build_failing_nvml(symbols: Sequence[str], library: Path) -> None:
    """Compile it to ``library`` in an existing directory."""
    source = library.with_suffix(".c")
    source.write_text(_SOURCE.replace("@SYMBOLS@", "\n".join(f"SYMBOL({symbol})" for symbol in symbols)))
    command: list[str | Path] = ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", library, source]
    subprocess.run([*command, f"-Wl,-soname,{contract.NVML_SONAME}", "-ldl"], check=True)
