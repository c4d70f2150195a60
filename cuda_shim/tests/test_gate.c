/* SPDX-License-Identifier: Apache-2.0 */
/* The gates of launches: every argument reaches where the gate leads, those on the stack too, and the answer comes back. */
#include <string.h>

#include "interpose/gate.h"
#include "interpose/pace.h"
#include "tests/support.h"

static _Atomic uint64_t watched = 2;
const _Atomic uint64_t *_Atomic aq_unpaced_watched = &watched;
_Atomic uint64_t aq_unpaced_seen;
__thread int64_t aq_unpaced_left = 100;

static struct {
	const char *reached;
	uint64_t sum;
} seen;

#define GRID_PARAMETERS                                                                                                        \
	CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,              \
		unsigned int bz, unsigned int shared, CUstream stream, void **params

/* Each argument counts for another power of ten, so that a swap of two changes the sum. */
static CUresult note(const char *reached, GRID_PARAMETERS, void **extra)
{
	seen.reached = reached;
	seen.sum = (uintptr_t)function + gx * 10u + gy * 100u + gz * 1000u + bx * 10000u + by * 100000u + bz * 1000000u +
		   shared * 10000000u + (uintptr_t)stream * 100000000u + (uintptr_t)params * 1000000000u + (uintptr_t)extra * 10000000000u;
	return CUDA_ERROR_NOT_READY;
}

#define ARGUMENTS function, gx, gy, gz, bx, by, bz, shared, stream, params
#define LAUNCH(name) \
	CUresult aq_paced_##name(GRID_PARAMETERS, void **extra) { return note("paced " #name, ARGUMENTS, extra); }             \
	static CUresult driver_##name(GRID_PARAMETERS, void **extra) { return note("driver " #name, ARGUMENTS, extra); }
#define COOPERATIVE(name) \
	CUresult aq_paced_##name(GRID_PARAMETERS) { return note("paced " #name, ARGUMENTS, NULL); }                            \
	static CUresult driver_##name(GRID_PARAMETERS) { return note("driver " #name, ARGUMENTS, NULL); }

LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernel_ptsz)
COOPERATIVE(cuLaunchCooperativeKernel)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz)

#define DIGIT(type, value) ((type)(uintptr_t)(value))
#define GRID_DIGITS DIGIT(CUfunction, 1), 2, 3, 4, 5, 6, 7, 8, DIGIT(CUstream, 9), DIGIT(void **, 1)

#define LEADS_TO(where, name, sum_wanted, ...)                                      \
	do {                                                                        \
		CHECK(name(__VA_ARGS__) == CUDA_ERROR_NOT_READY);                   \
		CHECK(!strcmp(seen.reached, where " " #name));                      \
		CHECK(seen.sum == (sum_wanted));                                    \
	} while (0)

#define ALL_LEAD_TO(where)                                                                                                       \
	do {                                                                                                                     \
		LEADS_TO(where, cuLaunchKernel, 21987654321u, GRID_DIGITS, DIGIT(void **, 2));                                   \
		LEADS_TO(where, cuLaunchKernel_ptsz, 21987654321u, GRID_DIGITS, DIGIT(void **, 2));                              \
		LEADS_TO(where, cuLaunchCooperativeKernel, 1987654321u, GRID_DIGITS);                                            \
		LEADS_TO(where, cuLaunchCooperativeKernel_ptsz, 1987654321u, GRID_DIGITS);                                       \
	} while (0)

int main(void)
{
	atomic_store(&aq_unpaced_seen, 2);
	ALL_LEAD_TO("paced"); /* free, and not opened yet */
#define OPEN(name) aq_gate_##name = driver_##name;
	AQ_GATES(OPEN)
#undef OPEN
	ALL_LEAD_TO("driver");
	atomic_store(&watched, 4); /* the limits changed */
	ALL_LEAD_TO("paced");
	atomic_store(&aq_unpaced_seen, 4);
	ALL_LEAD_TO("driver");
	aq_unpaced_left = 4;
	ALL_LEAD_TO("driver");
	CHECK(aq_unpaced_left == 0);
	ALL_LEAD_TO("paced"); /* to be counted, each of them until that is done */
	CHECK(aq_unpaced_left == -4);
	return 0;
}
