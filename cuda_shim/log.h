/* What the shim says, on stderr and nowhere else: a guest has no log file. Each line is one write(2), so lines of threads do not mix. */
#ifndef AQ_LOG_H
#define AQ_LOG_H

#include <stdint.h>

/* Raised by the limits file (enum aq_log_level); errors always pass. */
void aq_log_set_level(uint32_t level);

void aq_log_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aq_log_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aq_log_debug(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Why something could not be done, in a sentence, carried up to whoever may say it. */
struct aq_fault {
	char text[256];
};

/* Returns -1, so that a failing function can end with it. */
int aq_fault(struct aq_fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
