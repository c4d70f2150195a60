/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "region/layout.h"

#define INTERVAL_NS (1000000000ull / AQ_LOG_PER_SECOND)
#define KINDS 32 /* more than there are formats; what comes after them shares the last */

static _Atomic uint32_t level = AQ_LOG_ERROR;

/* Each kind of message has its own rate, so that a flood of one hides no other. A kind is one format string, and so one level. */
static struct {
	_Atomic(const char *) format;
	struct aq_log_rate rate;
} kinds[KINDS];

void aq_log_set_level(uint32_t new_level)
{
	atomic_store_explicit(&level, new_level, memory_order_relaxed);
}

#define NOTE " (%llu similar lines before this one were not printed)"

bool aq_log_rate_admits(struct aq_log_rate *rate, uint64_t now_ns, uint64_t *left_out)
{
	uint64_t owed = atomic_load_explicit(&rate->paid_until_ns, memory_order_relaxed), next;

	do {
		next = (owed > now_ns ? owed : now_ns) + INTERVAL_NS;
		if (next - now_ns > AQ_LOG_BURST * INTERVAL_NS) {
			atomic_fetch_add_explicit(&rate->left_out, 1, memory_order_relaxed);
			return false;
		}
	} while (!atomic_compare_exchange_weak_explicit(&rate->paid_until_ns, &owed, next, memory_order_relaxed, memory_order_relaxed));
	*left_out = atomic_exchange_explicit(&rate->left_out, 0, memory_order_relaxed);
	return true;
}

static struct aq_log_rate *rate_of(const char *format)
{
	size_t i = 0;

	for (; i < KINDS - 1; i++) {
		const char *seen = NULL;

		if (atomic_compare_exchange_strong_explicit(&kinds[i].format, &seen, format, memory_order_relaxed, memory_order_relaxed) ||
		    seen == format)
			break;
	}
	return &kinds[i].rate;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void print_message(uint32_t at, const char *format, va_list arguments)
{
	char line[512] = "aliquot: ";
	const size_t prefix = 9;
	uint64_t left_out;
	int saved_errno = errno; /* the application's, not ours to change */

	if (at > atomic_load_explicit(&level, memory_order_relaxed) || !aq_log_rate_admits(rate_of(format), now_ns(), &left_out))
		return;
	size_t end = prefix, most = sizeof(line) - sizeof(NOTE) - 20; /* digits, and what ends the line */
	int length = vsnprintf(line + end, most - end, format, arguments);
	if (length < 0)
		return;
	end = end + (size_t)length < most ? end + (size_t)length : most - 1;
	if (left_out && (length = snprintf(line + end, sizeof(line) - end, NOTE, (unsigned long long)left_out)) > 0)
		end += (size_t)length;
	line[end++] = '\n';
	if (syscall(SYS_write, STDERR_FILENO, line, end) < 0) { /* not libc's: cancel.h */
		/* stderr may be closed; there is nowhere else to write to */
	}
	errno = saved_errno;
}

#define PRINT(at)                               \
	do {                                  \
		va_list arguments;            \
		va_start(arguments, format);  \
		print_message(at, format, arguments);   \
		va_end(arguments);            \
	} while (0)

void aq_log_error(const char *format, ...)
{
	PRINT(AQ_LOG_ERROR);
}

void aq_log_warn(const char *format, ...)
{
	PRINT(AQ_LOG_WARN);
}

void aq_log_debug(const char *format, ...)
{
	PRINT(AQ_LOG_DEBUG);
}

int aq_fault(struct aq_fault *fault, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(fault->text, sizeof(fault->text), format, arguments);
	va_end(arguments);
	return -1;
}
