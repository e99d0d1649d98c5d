"""Policy losses beside PPO's, GSPO's and CISPO's: SAPO, FIPO, REAL, GPG, Clip-Cov, KL-Cov."""
