#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "region/layout.h"

static _Atomic uint32_t level = AQ_LOG_ERROR;

void aq_log_set_level(uint32_t new_level)
{
	atomic_store_explicit(&level, new_level, memory_order_relaxed);
}

static void say(uint32_t at, const char *format, va_list arguments)
{
	char line[512] = "aliquot: ";
	const size_t prefix = 9;
	int saved_errno = errno; /* the application's, not ours to change */

	if (at > atomic_load_explicit(&level, memory_order_relaxed))
		return;
	int length = vsnprintf(line + prefix, sizeof(line) - prefix - 1, format, arguments);
	if (length < 0)
		return;
	size_t end = prefix + (size_t)length;
	if (end > sizeof(line) - 2)
		end = sizeof(line) - 2;
	line[end++] = '\n';
	if (write(STDERR_FILENO, line, end) < 0) {
		/* stderr may be closed; there is nowhere else to say it */
	}
	errno = saved_errno;
}

#define SAY(at)                               \
	do {                                  \
		va_list arguments;            \
		va_start(arguments, format);  \
		say(at, format, arguments);   \
		va_end(arguments);            \
	} while (0)

void aq_log_error(const char *format, ...)
{
	SAY(AQ_LOG_ERROR);
}

void aq_log_warn(const char *format, ...)
{
	SAY(AQ_LOG_WARN);
}

void aq_log_debug(const char *format, ...)
{
	SAY(AQ_LOG_DEBUG);
}

int aq_fault(struct aq_fault *fault, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(fault->text, sizeof(fault->text), format, arguments);
	va_end(arguments);
	return -1;
}
