//! Arguments, runtime, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    seckill::cli::main().into()
}
