/* SPDX-License-Identifier: Apache-2.0 */
#include "early.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "cancel.h"

#define NAP_NS 20000 /* to find a driver takes a fraction of a millisecond */

static _Atomic pid_t holder;      /* the process; 0 = free */
static __thread bool is_inside;   /* a signal handler that forks in there has the lock already */
static __thread unsigned forking; /* a signal handler may fork while its thread forks */
static int cancel;                /* the holding thread's */

static void take(void)
{
	pid_t own = getpid(), found = 0;

	while (!atomic_compare_exchange_strong_explicit(&holder, &found, own, memory_order_acquire, memory_order_relaxed)) {
		if (found != own)
			continue; /* with what was found: a parent's, or free by now */
		aq_sleep(NAP_NS);
		found = 0;
	}
}

static void let_go(void)
{
	atomic_store_explicit(&holder, 0, memory_order_release);
}

static void before_fork(void)
{
	if (!forking++ && !is_inside)
		take();
}

static void after_fork(void)
{
	if (!--forking && !is_inside)
		let_go();
}

/* When the library is loaded: a fork that began before it runs no handlers, and could go on while another thread takes the lock first. */
__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(before_fork, after_fork, after_fork);
}

void aq_early_enter(void)
{
	int before = aq_hold_cancel();

	take();
	is_inside = true;
	cancel = before;
}

void aq_early_leave(void)
{
	int before = cancel;

	is_inside = false;
	let_go();
	aq_allow_cancel(before);
}
