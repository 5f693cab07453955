//! Compiles the contract with protox, so that nobody needs protoc.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

#[allow(clippy::disallowed_methods, reason = "cargo speaks to build scripts this way")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=lua");
    let files = ["seckill", "admin", "types", "error_reason"]
        .map(|name| format!("proto/seckill/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // The whole set, imports too: reflection answers questions about imported types from it.
    fs::write(out.join("seckill.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .codec_path("crate::api::codec::SmallBuffers")
        .compile_fds(descriptors)?;
    Ok(())
}
