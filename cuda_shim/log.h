/* SPDX-License-Identifier: Apache-2.0 */
/* The shim's messages, on stderr only: it has no log file in a container. Each line is one write(2), so lines of threads do not mix. A
 * repeated message is printed AQ_LOG_BURST times and then AQ_LOG_PER_SECOND times a second, with the number of lines left out. */
#ifndef AQ_LOG_H
#define AQ_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_LOG_BURST 30u
#define AQ_LOG_PER_SECOND 3u

/* Raised by the limits file (enum aq_log_level); errors always pass. */
void aq_log_set_level(uint32_t level);

void aq_log_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aq_log_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aq_log_debug(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A bucket of lines; all zero is a full one. No lock: signal handlers and forked children may take from it too. */
struct aq_log_rate {
	_Atomic uint64_t paid_until_ns; /* each line moves it on by its share of a second */
	_Atomic uint64_t left_out;      /* lines, since the last one printed */
};

/* May one more line be printed at `now_ns`, of a monotonic clock? If so, `*left_out` lines were dropped since the last one. */
bool aq_log_rate_admits(struct aq_log_rate *rate, uint64_t now_ns, uint64_t *left_out);

/* Why something failed, in a sentence, passed up to the caller that reports it. */
struct aq_fault {
	char text[256];
};

/* Returns -1, so that a failing function can end with it. */
int aq_fault(struct aq_fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
