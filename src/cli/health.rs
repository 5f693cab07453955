//! `seckill health`: whether a server serves, for probes of containers.

use clap::Args;
use serde_json::json;
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::{Context, Exit, client::Client, failure::Failure};
use crate::server::SERVICES;

/// Asks a server whether it serves; exits 1 when it does not.
///
/// For example: seckill health --server http://127.0.0.1:50051
#[derive(Debug, Args)]
pub struct Health {
    /// Ask about one service, seckill.v1.Seckill or seckill.v1.SeckillAdmin [without it: the whole
    /// server].
    #[arg(long, default_value = "", hide_default_value = true)]
    service: String,
}

impl Health {
    pub(super) async fn run(self, context: &Context) -> Result<Exit, Failure> {
        let client = Client::connect(&context.global).await?;
        let mut health = HealthClient::new(client.channel());
        let request = HealthCheckRequest { service: self.service.clone() };
        let answer = client.call(request, async |request| health.check(request).await).await;
        let answer = match answer {
            Err(Failure::Rpc(rpc)) if rpc.code == Code::NotFound => {
                return Err(Failure::Usage(format!(
                    "--service {:?}: the server has no such service; one of Seckill has {}",
                    self.service,
                    SERVICES.join(" and ")
                )));
            }
            answer => answer?,
        };
        let status = answer.status();
        context.printer.answer(&json!({
            "service": self.service,
            "status": status.as_str_name(),
        }));
        Ok(Exit::of(status == ServingStatus::Serving))
    }
}
