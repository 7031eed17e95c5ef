// See environment.h.
#include "environment.h"

#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace msl {

sigjmp_buf fault_return;

void report_timeout() {
  report(true, 0, 0, 0, "the kernel does not end: stopped after %u s of processor time",
         machine.launch->time_limit_s);
}

namespace {

uint64_t fault_address;
pthread_t runner;

void on_fault(int signal_number, siginfo_t* info, void*) {
  fault_address = reinterpret_cast<uint64_t>(info->si_addr);
  siglongjmp(fault_return, signal_number);
}

// At first, only sets a flag, so that the next access or meeting of threads ends the launch. If the kernel
// does neither until the timer fires again, it loops in its own code, and jumping out is safe.
void on_timer(int signal_number, siginfo_t*, void*) {
  if (!pthread_equal(pthread_self(), runner)) {
    pthread_kill(runner, signal_number);
    return;
  }
  if (machine.is_out_of_time) siglongjmp(fault_return, signal_number);
  machine.is_out_of_time = true;
}

#if defined(__x86_64__)
uint64_t float_mode() { return _mm_getcsr(); }
void set_float_mode(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
constexpr uint64_t kFlushDenormals = 0x8040;  // flush to zero, denormals are zero
#else                                         // aarch64; not tested yet
uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr uint64_t kFlushDenormals = uint64_t{1} << 24;
#endif

}  // namespace

Environment::Environment() {
  static uint8_t handler_stack[65536];
  runner = pthread_self();
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &old_stack_);
  struct sigaction action{};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    action.sa_sigaction = kSignals[i] == SIGVTALRM ? on_timer : on_fault;
    sigaction(kSignals[i], &action, &old_actions_[i]);
  }
  const itimerval timer{{1, 0}, {machine.launch->time_limit_s, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, &old_timer_);
  old_mode_ = float_mode();
  if (machine.launch->flush_denormals) set_float_mode(old_mode_ | kFlushDenormals);
}

Environment::~Environment() {
  set_float_mode(old_mode_);
  setitimer(ITIMER_VIRTUAL, &old_timer_, nullptr);
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old_actions_[i], nullptr);
  sigaltstack(&old_stack_, nullptr);
}

void report_signal(int signal_number) {
  if (signal_number == SIGFPE) {
    report(true, 0, 0, 0, "integer division by zero");
  } else if (signal_number == SIGVTALRM) {
    report_timeout();
  } else {
    describe_fault(fault_address);
  }
}

void check_time() {
  if (!machine.is_out_of_time) return;
  report_timeout();
  leave();
}

}  // namespace msl
