// State of the process during a launch: signal handlers, a time limit, a floating-point mode.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <sys/time.h>

#include <iterator>

#include "machine.h"

namespace msl {

// Jump target of faults; msl_launch sets it before a kernel runs.
extern sigjmp_buf fault_return;
void report_signal(int signal_number);

// The environment of a launch, in force as long as this object exists.
class Environment {
 public:
  Environment();
  ~Environment();
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
  stack_t old_stack_{};
  struct sigaction old_actions_[std::size(kSignals)];
  itimerval old_timer_{};
  uint64_t old_mode_ = 0;
};

}  // namespace msl
