/* Wrappers of launches whose arguments do not all fit in registers. They are in assembly, gate.S, which leaves those arguments on the stack
 * where they are: while aq_pace_free() holds they jump to the driver, else to the paced form in submit.c. */
#ifndef AQ_INTERPOSE_GATE_H
#define AQ_INTERPOSE_GATE_H

#include "cuda_abi.h"

#define AQ_GATES(X) X(cuLaunchKernel) X(cuLaunchKernel_ptsz) X(cuLaunchCooperativeKernel) X(cuLaunchCooperativeKernel_ptsz)

#define AQ_GATE(name)                                                                                        \
	extern __typeof__(name) aq_paced_##name;                                                             \
	extern __typeof__(&name) aq_gate_##name; /* where it leads while launches are free: also to the paced form until it is opened */
AQ_GATES(AQ_GATE)
#undef AQ_GATE

/* The driver is bound: lead there. */
void aq_gates_open(void);

#endif
