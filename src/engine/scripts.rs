//! One typed call per script.

use super::Script;

macro_rules! script {
    ($($(#[$doc:meta])* $const:ident = $file:literal;)*) => {
        $($(#[$doc])*
        pub const $const: Script = Script {
            name: $file,
            source: concat!(
                include_str!("../../lua/guard.lua"),
                include_str!(concat!("../../lua/", $file, ".lua"))
            ),
        };)*
        /// Every script, in the order of a reservation's life.
        pub const ALL: &[Script] = &[$($const),*];
    };
}

script! {
    WARMUP = "warmup";
    RESERVE = "reserve";
    ACKNOWLEDGE = "acknowledge";
    RELEASE = "release";
    UNACKED = "unacked";
    FIND = "find";
    LEVELS = "levels";
    FREEZE = "freeze";
    REBUILD_BEGIN = "rebuild_begin";
    REBUILD_LOAD = "rebuild_load";
    REBUILD_END = "rebuild_end";
    PING = "ping";
}
