//! Makes the code of the protocol.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/peer.proto");
    let files = protox::compile(["proto/peer.proto"], ["proto"])?;
    // A call of the protocol is named as the short cut to a connection that this leaves out.
    tonic_prost_build::configure().build_transport(false).compile_fds(files)?;
    Ok(())
}
