"""What is known of distant keys without reading them: their mean and covariance."""
