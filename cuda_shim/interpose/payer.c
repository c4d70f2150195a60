/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/payer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "interpose/admission.h"
#include "interpose/pacer.h"

#define PAYERS 512u

static struct aq_payer payers[PAYERS];
static struct aq_cost_table *_Atomic tables[AQ_MAX_DEVICES];

__thread struct aq_payer *aq_this_payer;

static bool has_ended(pid_t thread)
{
	return syscall(SYS_tgkill, getpid(), thread, 0) != 0 && errno == ESRCH;
}

/* A place among the payers that no living thread has; with what its last owner did not use. */
static struct aq_payer *claim(pid_t thread, bool from_ended)
{
	for (unsigned i = 0; i < PAYERS; i++) {
		pid_t owner = atomic_load_explicit(&payers[i].owner, memory_order_relaxed);

		if ((from_ended ? owner != 0 && has_ended(owner) : owner == 0) &&
		    atomic_compare_exchange_strong(&payers[i].owner, &owner, thread))
			return &payers[i];
	}
	return NULL;
}

struct aq_payer *aq_payer_new(void)
{
	int saved_errno = errno; /* the application's, not the shim's concern */
	pid_t thread = (pid_t)syscall(SYS_gettid);

	aq_this_payer = claim(thread, false);
	if (!aq_this_payer)
		aq_this_payer = claim(thread, true);
	errno = saved_errno;
	return aq_this_payer;
}

static struct aq_cost_table *costs_of(int device)
{
	struct aq_cost_table *costs = atomic_load_explicit(&tables[device], memory_order_acquire);

	if (__builtin_expect(costs != NULL, 1))
		return costs;
	struct aq_cost_table *made = calloc(1, sizeof(*made));
	if (made && !atomic_compare_exchange_strong(&tables[device], &costs, made)) {
		free(made);
		return costs;
	}
	return made;
}

struct aq_cost_entry *aq_cost_of_work(int device, const struct aq_work *work)
{
	struct aq_cost_table *costs = costs_of(device);

	return costs ? aq_cost_find(costs, work->function, work->blocks, work->threads) : NULL;
}

struct aq_cost_entry *aq_payer_look_up(struct aq_cached_cost *cached, int device, const struct aq_work *work)
{
	*cached = (struct aq_cached_cost){ work->function, work->blocks, work->threads, (uint32_t)device, aq_cost_of_work(device, work) };
	return cached->cost;
}

void aq_payer_refill(struct aq_payer *payer, int device, const struct aq_work *work, int64_t cost_ns)
{
	int64_t batch = aq_admission_batch(device);

	if (batch < cost_ns)
		batch = cost_ns;
	if (!aq_admit(device, work, batch))
		return;
	payer->credit_ns[device] += batch;
	atomic_fetch_add_explicit(&aq_pacers[device].mine->launches, payer->launches[device], memory_order_relaxed);
	payer->launches[device] = 0;
}

void aq_pay_at_once(int device, const struct aq_work *work, int64_t cost_ns)
{
	if (aq_admit(device, work, cost_ns))
		atomic_fetch_add_explicit(&aq_pacers[device].mine->launches, 1, memory_order_relaxed);
}

void aq_costs_forget(const void *function)
{
	for (unsigned i = 0; i < AQ_MAX_DEVICES; i++) {
		struct aq_cost_table *costs = atomic_load_explicit(&tables[i], memory_order_acquire);

		if (costs)
			aq_cost_forget(costs, function);
	}
}

void aq_payers_forget(void)
{
	aq_this_payer = NULL; /* its credit stays the parent's */
	for (unsigned i = 0; i < PAYERS; i++)
		if (atomic_load_explicit(&payers[i].owner, memory_order_relaxed))
			memset(&payers[i], 0, sizeof(payers[i]));
}
