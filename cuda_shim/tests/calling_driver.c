/* SPDX-License-Identifier: Apache-2.0 */
/* A driver with a subscriber: the simulated one (CALLING_DRIVER names its file), which reports the beginning and the end of its calls to a
 * tool, as NVIDIA's driver does. The tool may call CUDA from there; those calls are not reported. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>

#pragma GCC diagnostic ignored "-Wmissing-prototypes"

/* More arguments than any function of the driver has; each is passed on as it came. */
#define PARAMETERS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l

enum {
#define HOOK(symbol, base, since, flavour) ID_##symbol,
#define USE(symbol) ID_##symbol,
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"
#undef HOOK
#undef USE
	SYMBOLS
};

static const char *const symbols[] = {
#define HOOK(symbol, base, since, flavour) #symbol,
#define USE(symbol) #symbol,
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"
#undef HOOK
#undef USE
};

static long (*real[SYMBOLS])(PARAMETERS);
static void (*_Atomic subscriber)(void);

static void tell(void)
{
	static __thread bool is_telling;
	void (*call)(void) = subscriber;

	if (!call || is_telling)
		return;
	is_telling = true;
	call();
	is_telling = false;
}

static long forward(unsigned id, PARAMETERS)
{
	if (!real[id])
		return 801; /* CUDA_ERROR_NOT_SUPPORTED, as from a driver without it */
	tell();
	long result = real[id](ARGUMENTS);
	tell();
	return result;
}

#define PUBLIC __attribute__((visibility("default")))
#define HOOK(symbol, base, since, flavour) PUBLIC long symbol(PARAMETERS) { return forward(ID_##symbol, ARGUMENTS); }
#define USE(symbol) PUBLIC long symbol(PARAMETERS) { return forward(ID_##symbol, ARGUMENTS); }
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"

PUBLIC void calling_driver_subscribe(void (*call)(void))
{
	subscriber = call;
}

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CALLING_DRIVER");
	void *driver = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;

	if (!driver)
		abort();
	for (unsigned n = 0; n < SYMBOLS; n++)
		real[n] = (long (*)(PARAMETERS))dlsym(driver, symbols[n]);
}
