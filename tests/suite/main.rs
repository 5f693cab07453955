//! The behaviours of the server and its command line, one file each.

mod cli;
mod cli_client;
mod demo;
mod support;
