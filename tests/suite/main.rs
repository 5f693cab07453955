//! The suite: one file per behaviour, over the real server on port 0.
mod api_edge;
